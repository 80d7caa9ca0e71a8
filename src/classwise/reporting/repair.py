"""The report of a repair: settings, biases, cross-validated accuracies and the test evaluation.

It is the content of ``repair.json`` and of its page. Accuracies in percent.
"""

# K classes

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from classwise.core.errors import InputError
from classwise.reporting.estimates import ClassEstimate, Estimate, Interval, share
from classwise.reporting.figures import READABLE, Figure, Series, bars, heatmap, off_diagonal, points
from classwise.reporting.formatting import number, percent
from classwise.reporting.pages import answers_page
from classwise.reporting.part import Part
from classwise.reporting.report import Corrected, Result, ThreatInfo, Worst
from classwise.reporting.tables import Table, table_of
from classwise.storage.files import write_json, write_text
from classwise.storage.verdicts import NATURAL

MOST_LISTED = 20
"""Maximum number of classes that a table lists; of more, those that changed the most."""


class FittedOn(Part):
    """The images a repair was fitted to."""

    data: str
    split: str
    n: int
    per_class: list[int]
    digest: str
    origin: str
    """Validation images of the run, its training images, a named split, or data passed by the caller."""


class FrontierPoint(Part):
    """One point of the frontier: the model with the biases of one weight."""

    weight: float
    average: float
    worst: float
    tenth: float
    """Cross-validated and smoothed."""
    fitted_average: float
    fitted_worst: float
    """In-sample."""
    biases: list[float]


class Accuracies(Part):
    """The accuracies of a model on some images, class by class."""

    natural: Result
    robust: Result


class ClassOutcome(Part):
    """One class on test images, before and after."""

    label: int
    name: str = Field(alias="class")
    natural_before: Estimate
    natural_after: Estimate
    robust_before: Estimate
    robust_after: Estimate
    change: float
    """Robust accuracy, in points."""
    p_value: float | None
    """Exact McNemar test, corrected by Holm for the number of classes."""
    ece_before: float | None
    ece_after: float | None
    """Expected calibration error in percent, of the class's natural images."""
    corrupted_before: float | None
    corrupted_after: float | None
    """Mean accuracy over the natural corruptions."""


class OnTest(Part):
    """The test evaluation, before and after."""

    data: str
    attack: str
    average_before: Estimate
    average_after: Estimate
    average_change: float
    average_p: float | None
    worst_before: ClassEstimate
    worst_after: ClassEstimate
    worst_before_corrected: Corrected
    worst_after_corrected: Corrected
    rho: float | None
    natural_before: Estimate
    natural_after: Estimate
    natural_worst_before: float | None
    natural_worst_after: float | None
    ece_before: float | None
    ece_after: float | None
    corrupted_before: float | None
    corrupted_after: float | None
    by_class: list[ClassOutcome]
    errors_removed: list[list[int]] = Field(default_factory=list)
    """Row c, column j: how many fewer images of class c are predicted as class j under attack; negative: more."""
    findings: list[str] = Field(default_factory=list)
    """Findings of the evaluation of the repaired model, as ``severity: text``."""


class RepairReport(Part):
    """A repaired model: how it was repaired and what that changed."""

    schema_: Literal["classwise/repair/1"] = Field("classwise/repair/1", alias="schema")
    model: dict[str, Any]
    """The original model: name, spec and weights."""
    method: str
    settings: dict[str, Any]
    classes: list[str]
    threat: ThreatInfo
    choice: str | None = None
    """The rule or the floor; None for a method that has neither."""
    fitted_on: FittedOn | None
    """None for a method that uses no images."""
    search: dict[str, Any] = Field(default_factory=dict)
    """Settings of the margin search."""
    biases: list[float] | None = None
    """Biases added to the logits, by class; None for methods other than bias."""
    layer: str | None = None
    """The layer that holds the biases; None if the model is wrapped, and for other methods."""
    weight: float | None = None
    """Weight of the selected point of the frontier; 0 for the unchanged model."""
    selected: FrontierPoint | None = None
    frontier: list[FrontierPoint] = Field(default_factory=list)
    """Points from the unchanged model to the largest weight of the worst class."""
    fitting_before: Accuracies | None = None
    """The original model on the fitting images, by the margin matrix."""
    cross_validated: Accuracies | None = None
    """The repaired model on the fitting images, each scored with biases fitted without its fold."""
    test: OnTest | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @property
    def original_name(self) -> str:
        """Name of the original model."""
        return str(self.model.get("name", "model"))

    def to_json(self, path: str | Path) -> None:
        """Write the report to a JSON file."""
        write_json(Path(path), self.model_dump(mode="json", by_alias=True))

    def to_html(self, path: str | Path) -> None:
        """Write the report to a self-contained HTML page."""
        page = answers_page(f"Repair of {self.original_name}", f"method {self.method}", {"repair": self})
        write_text(Path(path), page)

    def sentences(self) -> list[str]:
        """Return the fit, the verdict on test images with its test, and what limits them."""
        found = [self._fit_sentence(), *([] if self.test is None else [_test_sentence(self.test), *self.test.findings])]
        audit = self.search.get("audit")
        if isinstance(audit, dict) and audit.get("at_most") is not None:
            found.append(
                f"The search attacked {self.search['targets']} of {len(self.classes) - 1} wrong classes. Audit of the "
                f"original model: of {audit['images']} images that survive the search, {audit['broken']} are broken "
                f"when all classes are attacked (95% upper bound: {audit['at_most']:.1f}% of all surviving images)."
            )
        return [*found, *self.notes]

    def _fit_sentence(self) -> str:
        on, before, after = self.fitted_on, self.fitting_before, self.cross_validated
        where = "" if on is None else f" on {on.n:,} images of {on.data}/{on.split} ({on.origin})"
        if before is None or after is None:
            return f"{self.original_name}: repaired with {self.method}{where}."
        smoothed = ""
        if self.selected is not None and (self.choice or "").startswith("floor"):
            smoothed = f" (smoothed and cross-validated: {self.selected.worst:.1f}%)"
        start = f"Fitted{where}, {self.choice}{smoothed}."
        if self.weight:
            return f"{start} Cross-validated worst class: {_worst(before.robust)} to {_worst(after.robust)}."
        why = "No point of the frontier is significantly better"
        if (self.choice or "").startswith("floor") and self.frontier:
            why = f"The worst class, {self.frontier[0].worst:.1f}% smoothed, already reaches the floor"
        return f"{start} {why}: the model is unchanged."

    def figures(self) -> list[Figure]:
        """The frontier, classes before and after, errors removed, and the biases."""
        found = []
        if self.frontier and self.fitting_before and self.cross_validated:
            found.append(self._frontier_figure(self.fitting_before, self.cross_validated))
        if self.test is not None:
            found += self._class_figures(self.test)
            if self.test.errors_removed:
                found.append(self._errors_figure(self.test))
        if self.biases is not None and len(self.classes) <= READABLE:
            series = [Series(name="bias", y=self.biases)]
            alt = "Bars of the bias added to the logit of each class."
            found.append(bars(self.classes, series, title="Class biases", alt=alt, y="added to the logit"))
        return found

    def _frontier_figure(self, before: Accuracies, after: Accuracies) -> Figure:
        front = self.frontier
        smoothed, fitted = "cross-validated, smoothed", "in-sample, smoothed"
        marks: list[tuple[str, Estimate, Interval | None, str]] = [
            ("original, counted", before.robust.overall, before.robust.worst, "square"),
            ("repaired, counted", after.robust.overall, after.robust.worst, "diamond"),
        ]
        if (test := self.test) is not None:
            marks += [
                ("original, test images", test.average_before, test.worst_before, "square-open"),
                ("repaired, test images", test.average_after, test.worst_after, "diamond-open"),
            ]
        return points(
            [
                Series(name=smoothed, x=[one.average for one in front], y=[one.worst for one in front]),
                Series(
                    name=fitted,
                    x=[one.fitted_average for one in front],
                    y=[one.fitted_worst for one in front],
                    symbol="circle-open",
                ),
                *(Series.of(name, [low], x=[mean.value], symbol=sign) for name, mean, low, sign in marks if low),
            ],
            title="Average against worst class",
            alt=f"Average against worst class under attack. {' '.join(self.sentences()[:2])}",
            x="average robust accuracy, %",
            y="worst class, %",
            joined=(smoothed, fitted),
        )

    def _class_figures(self, found: OnTest) -> list[Figure]:
        listed = self._listed(found)
        return [
            bars(
                [one.name for one in listed],
                [Series.of(when, [getattr(one, f"{kind}_{when}") for one in listed]) for when in ("before", "after")],
                title=f"{title} by class, before and after",
                alt=f"{title} of each class on {found.data}, before and after the repair, with 95% intervals.",
                y="accuracy, %",
            )
            for kind, title in (("robust", f"Robust accuracy under {found.attack}"), (NATURAL, "Natural accuracy"))
        ]

    def tables(self) -> list[Table]:
        """Expected and measured accuracy, classes before and after, and the frontier."""
        found = []
        if self.fitting_before is not None and self.cross_validated is not None:
            found.append(self._expected_table(self.fitting_before, self.cross_validated))
        if self.test is not None:
            found.append(self._class_table(self.test))
        if self.frontier:
            found.append(table_of("Frontier", self.frontier, _FRONTIER, about=_ABOUT_FRONTIER))
        return found

    def _expected_table(self, before: Accuracies, after: Accuracies) -> Table:
        test, titles = self.test, {"ECE": "ece", "corruptions": "corrupted"}
        more = {name: field for name, field in titles.items() if test and getattr(test, f"{field}_before") is not None}
        rows = [
            [name, images, share(one.robust.overall, "%"), _worst(one.robust), share(one.natural.overall, "%")]
            + ["–"] * len(more)
            for name, images, one in (
                ("original", "fit set", before),
                ("repaired", "fit set, cross-validated", after),
            )
        ]
        if test is not None:
            rows += [
                [
                    name,
                    test.data,
                    share(getattr(test, f"average_{when}"), "%"),
                    _named(getattr(test, f"worst_{when}")),
                    share(getattr(test, f"natural_{when}"), "%"),
                    *(percent(getattr(test, f"{field}_{when}")) for field in more.values()),
                ]
                for name, when in (("original", "before"), ("repaired", "after"))
            ]
        return Table(
            title="Expected and measured accuracy",
            about="With 95% intervals. Fit set: the images that the biases are fitted to, by the margin matrix; "
            "cross-validated: each image is scored with biases fitted without its fold. ECE: calibration error on "
            "natural images.",
            columns=["model", "images", "robust average", "worst class", "natural average", *more],
            rows=rows,
        )

    def _class_table(self, found: OnTest) -> Table:
        listed = self._listed(found)
        left = len(found.by_class) - len(listed)
        return table_of(
            "Classes before and after",
            listed,
            _CLASSES,
            about=f"On {found.data} under {found.attack}, in percent. ECE: calibration error on natural images.",
            foot=f"The {left} classes with the smallest changes are omitted." if left else "",
        )

    def _errors_figure(self, found: OnTest) -> Figure:
        return heatmap(
            off_diagonal(found.errors_removed),
            title="Errors removed, by true and predicted class",
            alt="A matrix of the change in errors: each row a true class, each column the class predicted under "
            f"{found.attack}; positive values are fewer errors.",
            names=self.classes,
            x="predicted class",
            y="true class",
            unit="fewer errors",
        )

    def _listed(self, found: OnTest) -> list[ClassOutcome]:
        """All classes, or those that changed the most, in the order of the labels."""
        if len(found.by_class) <= MOST_LISTED:
            return found.by_class
        most = sorted(found.by_class, key=lambda one: -abs(one.change))[:MOST_LISTED]
        return sorted(most, key=lambda one: one.label)


def load_repair(path: str | Path) -> RepairReport:
    """Read the repair of a run directory, or a ``repair.json``."""
    path = Path(path)
    file = path / "repair.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path} is not the directory of a repair: it holds no repair.json")
    return RepairReport.read(file, "a classwise repair", "repair the model again")


_CLASSES: dict[str, Callable[[ClassOutcome], str]] = {
    "class": lambda one: one.name,
    "robust before": lambda one: share(one.robust_before),
    "robust after": lambda one: share(one.robust_after),
    "change": lambda one: f"{one.change:+.1f}",
    "p": lambda one: "–" if one.p_value is None else f"{one.p_value:.2g}",
    "natural before": lambda one: number(one.natural_before.value),
    "natural after": lambda one: number(one.natural_after.value),
    "ECE before": lambda one: number(one.ece_before),
    "ECE after": lambda one: number(one.ece_after),
}
_FRONTIER: dict[str, Callable[[FrontierPoint], str]] = {
    "weight": lambda one: f"{one.weight:.3g}",
    "average": lambda one: number(one.average),
    "worst class": lambda one: number(one.worst),
    "weakest tenth": lambda one: number(one.tenth),
    "in-sample average": lambda one: number(one.fitted_average),
    "in-sample worst": lambda one: number(one.fitted_worst),
}
_ABOUT_FRONTIER = "Smoothed robust accuracy in percent, cross-validated unless marked in-sample."


def _test_sentence(found: OnTest) -> str:
    p = "" if found.average_p is None else f" (p = {found.average_p:.2g})"
    rho = "" if found.rho is None else f" rho = {found.rho:+.2f}."
    return (
        f"On {found.data} under {found.attack} the worst class changes from {_named(found.worst_before)} to "
        f"{_named(found.worst_after)}; the average changes by {found.average_change:+.1f} points to "
        f"{share(found.average_after, '%')}{p}.{rho}"
    )


def _worst(result: Result) -> str:
    return "–" if result.worst is None else _named(result.worst)


def _named(part: ClassEstimate | Worst) -> str:
    return f"{share(part, '%')} ({part.name})"
