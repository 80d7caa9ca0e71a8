"""The report of a repair: what was fitted, what it promised on held-out images, and what the test images gave.

This is what ``repair.json`` holds, and what its page shows. Accuracies in percent.
"""

# K classes

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from classwise.errors import InputError
from classwise.files import read_json, write_json, write_text
from classwise.reporting.estimates import ClassEstimate, Estimate, share
from classwise.reporting.figures import READABLE, Figure, Series, bars, heatmap, points
from classwise.reporting.part import Part
from classwise.reporting.report import Corrected, Result, ThreatInfo
from classwise.reporting.tables import Table
from classwise.verdicts import NATURAL

SIGNIFICANT = 0.05
MOST_LISTED = 20
"""Classes that a table lists; of more, those that changed the most."""


class FittedOn(Part):
    """The images a repair was fitted to."""

    data: str
    split: str
    n: int
    per_class: list[int]
    digest: str
    origin: str
    """Why these: held out by the training, or named by the user."""


class FrontierPoint(Part):
    """One point of the frontier: the model with the biases of one weight."""

    weight: float
    average: float
    worst: float
    tenth: float
    """On held-out images."""
    fitted_average: float
    fitted_worst: float
    """On the images that were fitted."""
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


class Delivered(Part):
    """What an attack on test images found, before and after."""

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
    exchange: list[list[int]] = Field(default_factory=list)
    """Row c, column j: images of class c that are no longer taken for class j under attack, less those that now are."""
    findings: list[str] = Field(default_factory=list)
    """Findings of the evaluation of the repaired model, as ``severity: text``."""


class RepairReport(Part):
    """A repaired model: how it was repaired and what that changed."""

    schema_: Literal["classwise/repair/1"] = Field("classwise/repair/1", alias="schema")
    model: dict[str, Any]
    """What was repaired: its name, spec and weights."""
    method: str
    settings: dict[str, Any]
    classes: list[str]
    threat: ThreatInfo
    choice: str
    """The rule, or the floor."""
    fitted_on: FittedOn | None
    """None for a method that uses no images."""
    search: dict[str, Any] = Field(default_factory=dict)
    """Settings of the margin search."""
    biases: list[float] | None = None
    """Added to the logits, by class; None for a method that changes more."""
    layer: str | None = None
    """The layer that holds them; None where the model was wrapped."""
    weight: float | None = None
    """Of the weak classes at the chosen point of the frontier; 0 for the model as it is."""
    frontier: list[FrontierPoint] = Field(default_factory=list)
    before: Accuracies | None = None
    """Of the original model on the fitting images, by the margin matrix."""
    promised: Accuracies | None = None
    """Of the repaired model on the fitting images, each judged under biases fitted without it."""
    delivered: Delivered | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @property
    def name(self) -> str:
        """What the repaired model is called."""
        return str(self.model.get("name", "model"))

    def to_json(self, path: str | Path) -> None:
        """Write ``repair.json``."""
        write_json(Path(path), self.model_dump(mode="json", by_alias=True))

    def to_html(self, path: str | Path) -> None:
        """Write the page."""
        from classwise.reporting.pages import answers_page

        write_text(Path(path), answers_page(f"Repair of {self.name}", f"method {self.method}", {"repair": self}))

    def sentences(self) -> list[str]:
        """The result in words."""
        found = [*self._fit_sentences(), *self._test_sentences()]
        audit = self.search.get("audit")
        if isinstance(audit, dict) and audit.get("at_most") is not None:
            found.append(
                f"The search attacked {self.search['targets']} of {len(self.classes) - 1} wrong classes. With all of "
                f"them attacked, {audit['broken']} of {audit['images']} robust images break, so at most "
                f"{audit['at_most']:.1f}% of all (95%)."
            )
        return [*found, *self.notes]

    def _fit_sentences(self) -> list[str]:
        if self.before is None or self.promised is None or self.fitted_on is None:
            return [f"{self.name} was repaired with the method {self.method}."]
        on = self.fitted_on
        where = f"{on.n:,} images of {on.data}/{on.split} ({on.origin})"
        if not self.weight:
            worst = _worst(self.before.robust)
            why = "the worst class is above it" if "floor" in self.choice else "no class biases are better than none"
            return [f"Fitted to {where} by {self.choice}: {why} ({worst}). The model is unchanged."]
        before, after = self.before.robust, self.promised.robust
        return [
            f"Fitted to {where} by {self.choice}. On held-out images the worst class goes from {_worst(before)} to "
            f"{_worst(after)}, the average from {_overall(before)} to {_overall(after)}; natural accuracy from "
            f"{_overall(self.before.natural)} to {_overall(self.promised.natural)}."
        ]

    def _test_sentences(self) -> list[str]:
        found = self.delivered
        if found is None:
            return []
        p = "" if found.average_p is None else f" (p = {found.average_p:.2g})"
        rho = "" if found.rho is None else f" rho is {found.rho:+.2f}."
        changed = [one for one in found.by_class if one.p_value is not None and one.p_value < SIGNIFICANT]
        up = [f"{one.name} {one.change:+.1f}" for one in changed if one.change > 0]
        down = [f"{one.name} {one.change:+.1f}" for one in changed if one.change < 0]
        sentences = [
            f"On {found.data} under {found.attack} the worst class goes from {share(found.worst_before, '%')} "
            f"({found.worst_before.name}) to {share(found.worst_after, '%')} ({found.worst_after.name}), the average "
            f"changes by {found.average_change:+.1f} points to {share(found.average_after, '%')}{p}.{rho}",
            f"Natural accuracy goes from {share(found.natural_before, '%')} to {share(found.natural_after, '%')}, the "
            f"calibration error from {_number(found.ece_before)} to {_number(found.ece_after)}"
            + (
                "."
                if found.corrupted_before is None
                else f", accuracy under corruptions from {_number(found.corrupted_before)} to "
                f"{_number(found.corrupted_after)}."
            ),
        ]
        if up or down:
            parts = [f"gain: {', '.join(up)}" if up else "", f"lose: {', '.join(down)}" if down else ""]
            sentences.append(f"Significant changes by class, in points; {'; '.join(filter(None, parts))}.")
        else:
            sentences.append("No class changes significantly.")
        return [*sentences, *found.findings]

    def figures(self) -> list[Figure]:
        """The frontier, classes before and after, and the biases."""
        found = [self._frontier_figure()] if self.frontier and self.before and self.promised else []
        if self.delivered is not None:
            found += self._class_figures(self.delivered)
            if self.delivered.exchange:
                found.append(self._exchange_figure(self.delivered))
        if self.biases is not None and len(self.classes) <= READABLE:
            found.append(
                bars(
                    self.classes,
                    [Series(name="bias", y=self.biases)],
                    title="Class biases",
                    alt="Bars of the bias added to the logit of each class.",
                    y="added to the logit",
                )
            )
        return found

    def _frontier_figure(self) -> Figure:
        before, after = self.before, self.promised
        assert before is not None
        assert after is not None
        series = [
            Series(
                name="held-out images", x=[one.average for one in self.frontier], y=[one.worst for one in self.frontier]
            ),
            Series(
                name="fitted images",
                x=[one.fitted_average for one in self.frontier],
                y=[one.fitted_worst for one in self.frontier],
                symbol="circle-open",
            ),
            _mark("before", before.robust, "square"),
            _mark("chosen, held-out images", after.robust, "diamond"),
        ]
        if (test := self.delivered) is not None:
            for name, average, worst, symbol in (
                ("before, test images", test.average_before, test.worst_before, "square-open"),
                ("after, test images", test.average_after, test.worst_after, "diamond-open"),
            ):
                series.append(
                    Series(
                        name=name, x=[average.value], y=[worst.value], low=[worst.low], high=[worst.high], symbol=symbol
                    )
                )
        return points(
            series,
            title="Frontier of the average against the worst class",
            alt=f"Average against worst class under attack. {' '.join(self.sentences()[:2])}",
            x="average robust accuracy, %",
            y="worst class, %",
            joined=("held-out images", "fitted images"),
        )

    def _class_figures(self, found: Delivered) -> list[Figure]:
        listed = self._listed(found)
        return [
            bars(
                [one.name for one in listed],
                [
                    Series(
                        name=name,
                        y=[part.value for part in parts],
                        low=[part.low for part in parts],
                        high=[part.high for part in parts],
                    )
                    for name, parts in (
                        ("before", [getattr(one, f"{kind}_before") for one in listed]),
                        ("after", [getattr(one, f"{kind}_after") for one in listed]),
                    )
                ],
                title=f"{title} by class, before and after",
                alt=f"{title} of each class on {found.data}, before and after the repair, with 95% intervals.",
                y="accuracy, %",
            )
            for kind, title in (("robust", f"Robust accuracy under {found.attack}"), (NATURAL, "Natural accuracy"))
        ]

    def tables(self) -> list[Table]:
        """Promised against delivered, classes before and after, and the frontier."""
        found = []
        if self.before is not None and self.promised is not None:
            found.append(self._promise_table(self.before, self.promised))
        if self.delivered is not None:
            found.append(self._class_table(self.delivered))
        if self.frontier:
            found.append(self._frontier_table())
        return found

    def _promise_table(self, before: Accuracies, promised: Accuracies) -> Table:
        rows = [
            ["before", "held out", _overall(before.robust), _worst(before.robust), _overall(before.natural)],
            ["after", "held out", _overall(promised.robust), _worst(promised.robust), _overall(promised.natural)],
        ]
        if (test := self.delivered) is not None:
            rows += [
                [name, test.data, share(average), share(worst), share(natural)]
                for name, average, worst, natural in (
                    ("before", test.average_before, test.worst_before, test.natural_before),
                    ("after", test.average_after, test.worst_after, test.natural_after),
                )
            ]
        return Table(
            title="Promised and delivered",
            about="Accuracies in percent with 95% intervals. Held out: images of the fit, each judged under biases "
            "fitted without it, by the margin matrix.",
            columns=["model", "images", "robust average", "worst class", "natural average"],
            rows=rows,
        )

    def _class_table(self, found: Delivered) -> Table:
        listed = self._listed(found)
        left = len(found.by_class) - len(listed)
        return Table(
            title="Classes before and after",
            about=f"On {found.data} under {found.attack}, in percent. ECE: calibration error on natural images.",
            columns=[
                "class",
                "robust before",
                "after",
                "change",
                "p",
                "natural before",
                "after",
                "ECE before",
                "after",
            ],
            rows=[
                [
                    one.name,
                    share(one.robust_before),
                    share(one.robust_after),
                    f"{one.change:+.1f}",
                    "–" if one.p_value is None else f"{one.p_value:.2g}",
                    _number(one.natural_before.value),
                    _number(one.natural_after.value),
                    _number(one.ece_before),
                    _number(one.ece_after),
                ]
                for one in listed
            ],
            foot=f"{left} classes that changed less are not listed." if left else "",
        )

    def _frontier_table(self) -> Table:
        return Table(
            title="Frontier",
            about="Robust accuracy in percent by the weight of the weak classes; average and worst on held-out images.",
            columns=["weight", "average", "worst class", "weakest tenth", "average, fitted", "worst, fitted"],
            rows=[
                [
                    f"{one.weight:.3g}",
                    *(
                        f"{value:.1f}"
                        for value in (one.average, one.worst, one.tenth, one.fitted_average, one.fitted_worst)
                    ),
                ]
                for one in self.frontier
            ],
        )

    def _exchange_figure(self, found: Delivered) -> Figure:
        return heatmap(
            [
                [None if row == column else float(count) for column, count in enumerate(counts)]
                for row, counts in enumerate(found.exchange)
            ],
            title="Which class gave to which",
            alt="A matrix of images gained and lost: each row a true class, each column the class its images are taken "
            f"for under {found.attack}.",
            names=self.classes,
            x="taken for",
            y="true class",
            unit="images",
        )

    def _listed(self, found: Delivered) -> list[ClassOutcome]:
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
        raise InputError(f"{path} holds no repair.json: it is not the directory of a repair")
    try:
        return RepairReport.model_validate(read_json(file))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(f"{file} is not a repair: {where}: {error.errors()[0]['msg']}") from None


def _mark(name: str, result: Result, symbol: str) -> Series:
    worst = result.worst
    assert worst is not None
    return Series(
        name=name, x=[result.overall.value], y=[worst.value], low=[worst.low], high=[worst.high], symbol=symbol
    )


def _worst(result: Result) -> str:
    return "–" if result.worst is None else f"{share(result.worst, '%')} ({result.worst.name})"


def _overall(result: Result) -> str:
    return share(result.overall, "%")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
