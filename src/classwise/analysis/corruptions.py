"""Whether classes that suffer under attack suffer under natural corruptions too (Benz et al. 2020, Section 3.4).

Accuracies are means over the corruptions of a family, at one severity or at all. The interval of a class takes images,
not corrupted copies, as its sample. How the classes' accuracies under each family go with those under attack is told by
Pearson's and Spearman's coefficients over classes; how their intervals are made is said in ``correlation``. The natural
accuracy stands among the families: what already sets classes apart untouched is no work of a corruption.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt

from classwise.analysis.correlation import Correlation, pearson, spearman
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.core.errors import InputError
from classwise.metrics import class_variance, max_class_difference
from classwise.reporting.corruptions import CorruptionResult
from classwise.reporting.estimates import ClassEstimate, Estimate, estimate
from classwise.reporting.figures import COLOURS, Figure, Series, heatmap, lines
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL


class Severity(Part):
    """A family at one severity."""

    severity: int
    overall: Estimate
    by_class: list[ClassEstimate]

    @property
    def worst(self) -> ClassEstimate:
        """The weakest class."""
        return _worst(self.by_class)


class Family(Part):
    """What one family of corruptions, or nothing at all, left of a model."""

    family: str
    kinds: list[str]
    overall: Estimate
    by_class: list[ClassEstimate]
    cv: float
    mcd: float
    pearson: Correlation
    spearman: Correlation
    """Of the classes' accuracies with those under attack."""
    severities: list[Severity]

    @property
    def worst(self) -> ClassEstimate:
        """The weakest class."""
        return _worst(self.by_class)


class Corrupted(Answer):
    """The classes of one model on corrupted images and under attack."""

    kind: ClassVar[str] = "corruptions"

    model: str
    dataset: str
    attack: str
    classes: list[str]
    adversarial: Family
    natural: Family
    families: list[Family]

    def sentences(self) -> list[str]:
        weak = self.adversarial.worst
        found = [f"Under {self.attack} the worst class is {weak.name} ({weak.value:.1f}%)."]
        for one in self.families:
            worst = one.worst
            same = f"{worst.name} too" if worst.label == weak.label else worst.name
            related = (
                "too few classes, or classes too alike, to relate them to robustness"
                if one.spearman.value is None
                else f"class accuracies go with robustness by {one.pearson} (Pearson), {one.spearman} (Spearman)"
            )
            found.append(f"Under {one.family} it is {same} ({worst.value:.1f}%); {related}.")
        if self.natural.spearman.value is not None:
            found.append(f"For comparison, natural accuracies go with it by {self.natural.spearman} (Spearman).")
        return found

    def tables(self) -> list[Table]:
        parts = [self.natural, *self.families]
        found = [
            Table(
                title=f"corruptions and {self.attack}",
                about="Accuracy in percent, CV in percent²; correlation of the class accuracies with those under "
                f"{self.attack} [95%].",
                columns=["family", "average", "worst", "worst class", "CV", "MCD", "Pearson", "Spearman"],
                rows=[[*_summary(one), str(one.pearson), str(one.spearman)] for one in parts]
                + [[*_summary(self.adversarial), "", ""]],
            )
        ]
        severities = sorted({part.severity for one in self.families for part in one.severities})
        if len(severities) > 1:
            found.append(
                Table(
                    title="by severity",
                    about="Average accuracy in percent, and that of the worst class.",
                    columns=["family", *map(str, severities)],
                    rows=[
                        [
                            one.family,
                            *(
                                f"{part.overall.value:.1f} / {part.worst.value:.1f}" if part else "–"
                                for severity in severities
                                for part in [own.get(severity)]
                            ),
                        ]
                        for one in self.families
                        for own in [{part.severity: part for part in one.severities}]
                    ],
                )
            )
        return found

    def figures(self) -> list[Figure]:
        parts = [self.natural, *self.families, self.adversarial]
        found = [
            heatmap(
                [[one.by_class[label].value for one in parts] for label in range(len(self.classes))],
                title="Accuracy by class and family",
                alt=f"Accuracy of each class of {self.model} on {self.dataset}. {' '.join(self.sentences())}",
                names=self.classes,
                columns=[one.family for one in parts],
                x="family",
                y="class",
                unit="%",
                digits=1,
                span=(0, 100),
            )
        ]
        if any(len(one.severities) > 1 for one in self.families):
            series = []
            for place, one in enumerate(self.families):
                at, colour = [part.severity for part in one.severities], COLOURS[place % len(COLOURS)]
                average, worst = zip(*((part.overall.value, part.worst.value) for part in one.severities), strict=True)
                series.append(Series(name=one.family, x=at, y=average, colour=colour))
                series.append(Series(name=f"{one.family}, worst class", x=at, y=worst, colour=colour, dash="dash"))
            found.append(
                lines(
                    series,
                    title="Accuracy by severity, on average and in the worst class",
                    alt=f"Curves of the accuracy of {self.model} over the severity of each family.",
                    x="severity",
                    y="accuracy, %",
                    zero=True,
                )
            )
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "family": one.family,
                "severity": severity,
                "label": part.label,
                "class": part.name,
                "value": part.value,
                "low": part.low,
                "high": part.high,
                "n": part.n,
            }
            for one in [self.natural, *self.families, self.adversarial]
            for severity, by_class in [(None, one.by_class), *((own.severity, own.by_class) for own in one.severities)]
            for part in by_class
        ]


def corruptions(run: Subject | str | Path, *, attack: str | None = None, seed: NonNegativeInt = 0) -> Corrupted:
    """Class accuracies on corrupted images beside those under ``attack``, else under all attacks together."""
    subject = Subject.open(run)
    report = subject.report
    if report.corruptions is None:
        raise InputError(f"{subject.path} was evaluated without corruptions: evaluate with --attack corruptions")
    key = subject.key(attack)
    if not any(part.n for part in report[key].by_class):
        raise InputError(f"{subject.path} holds no examples")
    robust = [part.value for part in report[key].by_class]

    def family(
        name: str, results: Sequence[CorruptionResult], overall: Estimate, by_class: list[ClassEstimate]
    ) -> Family:
        shares = [part.value for part in by_class]
        known = [share for share in shares if share is not None]
        cv, mcd = class_variance(known), max_class_difference(known)
        assert cv is not None
        assert mcd is not None
        return Family(
            family=name,
            kinds=list(dict.fromkeys(part.kind for part in results)),
            overall=overall,
            by_class=by_class,
            cv=round(cv, 4),
            mcd=round(mcd, 4),
            pearson=pearson(shares, robust),
            spearman=spearman(shares, robust, seed),
            severities=[
                mean_of(severity, [part for part in results if part.severity == severity])
                for severity in sorted({part.severity for part in results})
            ],
        )

    return Corrupted(
        model=subject.name,
        dataset=report.dataset.name,
        attack=key,
        classes=subject.classes,
        adversarial=family(key, [], report[key].overall, report[key].by_class),
        natural=family(NATURAL, [], report[NATURAL].overall, report[NATURAL].by_class),
        families=[
            family(
                one.family,
                [part for part in report.corruptions.results if part.family == one.family],
                one.overall,
                one.by_class,
            )
            for one in report.corruptions.families
        ],
    )


def mean_of(severity: int, results: Sequence[CorruptionResult]) -> Severity:
    """The mean over corruptions of one severity, which all saw the same images."""

    def mean(parts: Sequence[Estimate]) -> dict[str, Any]:
        n = parts[0].n
        correct = sum(round((part.value or 0.0) * n / 100) for part in parts)  # reports round shares, not counts
        return estimate(correct / len(parts), n)

    by_class = [
        ClassEstimate(label=parts[0].label, name=parts[0].name, **mean(parts))
        for parts in zip(*(result.by_class for result in results), strict=True)
    ]
    return Severity(severity=severity, overall=Estimate(**mean([one.overall for one in results])), by_class=by_class)


def _worst(by_class: Sequence[ClassEstimate]) -> ClassEstimate:
    return min((part for part in by_class if part.value is not None), key=lambda part: part.value or 0.0)


def _summary(one: Family) -> list[str]:
    worst = one.worst
    return [one.family, f"{one.overall.value:.1f}", f"{worst.value:.1f}", worst.name, f"{one.cv:.1f}", f"{one.mcd:.1f}"]
