"""Class accuracies under corruptions and under attack (Benz et al. 2020, Section 3.4).

Accuracies are means over the corruptions of a family, at one severity or at all. The interval of a class takes images,
not corrupted copies, as its sample. Pearson's and Spearman's coefficients relate the class accuracies under each family
to those under attack (see ``correlation``). The natural accuracy is listed with the families, because differences
between classes that exist on natural images are not due to a corruption.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import NonNegativeInt

from classwise.analysis.correlation import pearson, spearman
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import Run, condition
from classwise.core.errors import InputError
from classwise.metrics import class_variance, max_class_difference
from classwise.reporting.corruptions import CorruptionResult
from classwise.reporting.estimates import ClassEstimate, Estimate, estimate
from classwise.reporting.figures import SERIES_COLORS, Figure, Series, heatmap, lines
from classwise.storage.verdicts import NATURAL


def corruptions(run: Run | str | Path, *, attack: str | None = None, seed: NonNegativeInt = 0) -> AnalysisResult:
    """Class accuracies under corruptions and under ``attack``, by default the worst case over all."""
    run = Run.open(run)
    report = run.report
    if report.corruptions is None:
        raise InputError(f"{run.path} was evaluated without corruptions: add --attack corruptions to the evaluation")
    key = run.key(attack)
    if not any(part.n for part in report[key].by_class):
        raise InputError(f"{run.path} has no examples")
    robust = [part.value for part in report[key].by_class]

    def family(
        name: str, results: Sequence[CorruptionResult], overall: Estimate, by_class: list[ClassEstimate]
    ) -> Record:
        shares = [part.value for part in by_class]
        known = [share for share in shares if share is not None]
        cv, mcd = class_variance(known), max_class_difference(known)
        assert cv is not None
        assert mcd is not None
        return Record(
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

    values = Record(
        model=run.name,
        dataset=report.dataset.name,
        attack=key,
        classes=run.classes,
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
    finding = _finding(values)
    parts = [values.natural, *values.families, values.adversarial]
    return AnalysisResult(
        name="corruptions",
        finding=finding,
        values=values,
        frames={"classes": _class_frame(parts), "families": frame_of(_family_row(one) for one in parts)},
        draw=lambda: _figures(values, parts, finding),
    )


def mean_of(severity: int, results: Sequence[CorruptionResult]) -> Record:
    """Return the means over the corruptions of one severity, which use the same images."""

    def mean(parts: Sequence[Estimate]) -> dict[str, Any]:
        n = parts[0].n
        correct = sum(round((part.value or 0.0) * n / 100) for part in parts)  # shares in reports are rounded
        return estimate(correct / len(parts), n)

    by_class = [
        ClassEstimate(label=parts[0].label, name=parts[0].name, **mean(parts))
        for parts in zip(*(result.by_class for result in results), strict=True)
    ]
    return Record(severity=severity, overall=Estimate(**mean([one.overall for one in results])), by_class=by_class)


def _worst(by_class: Sequence[ClassEstimate]) -> ClassEstimate:
    return min((part for part in by_class if part.value is not None), key=lambda part: part.value or 0.0)


def _class_frame(parts: list[Record]) -> pd.DataFrame:
    """Return one row for each family, severity and class; no severity is the mean over all."""
    frame = frame_of(
        {
            "family": one.family,
            "severity": severity,
            "label": part.label,
            "class": part.name,
            **interval_columns("accuracy_percent", part),
            "n": part.n,
        }
        for one in parts
        for severity, by_class in (
            (None, one.by_class),
            *((part.severity, part.by_class) for part in one.severities),
        )
        for part in by_class
    )
    return frame.astype({"severity": "Int64"})


def _family_row(one: Record) -> dict[str, object]:
    worst = _worst(one.by_class)
    return {
        "family": one.family,
        **interval_columns("average_percent", one.overall),
        **interval_columns("worst_class_percent", worst),
        "worst_class": worst.name,
        "class_variance": one.cv,
        "max_class_difference_points": one.mcd,
        **interval_columns("pearson_with_attack", one.pearson),
        **interval_columns("spearman_with_attack", one.spearman),
        "spearman_p_value": one.spearman.p_value,
    }


def _finding(values: Record) -> str:
    known = [one for one in values.families if one.spearman.value is not None]
    weak = _worst(values.adversarial.by_class)
    same = sum(_worst(one.by_class).label == weak.label for one in values.families)
    sentence = (
        f"The worst class {condition(values.attack)}, {weak.name} ({weak.value:.1f}%), is the worst under {same} of "
        f"{len(values.families)} families of corruptions"
    )
    if not known:
        return f"{sentence}; class accuracies cannot be correlated (too few classes, or no variation)."
    most = max(known, key=lambda one: abs(float(one.spearman.value)))
    return f"{sentence}; class accuracies correlate most under {most.family}, with Spearman {most.spearman.with_p}."


def _figures(values: Record, parts: list[Record], finding: str) -> list[Figure]:
    found = [
        heatmap(
            [[one.by_class[label].value for one in parts] for label in range(len(values.classes))],
            title="Accuracy by class and family",
            alt=f"Accuracy of each class of {values.model} on {values.dataset}. {finding}",
            names=values.classes,
            columns=[one.family for one in parts],
            x="family",
            y="class",
            unit="%",
            digits=1,
            span=(0, 100),
        )
    ]
    if any(len(one.severities) > 1 for one in values.families):
        series = []
        for place, one in enumerate(values.families):
            x, color = [part.severity for part in one.severities], SERIES_COLORS[place % len(SERIES_COLORS)]
            average = [part.overall.value for part in one.severities]
            worst = [_worst(part.by_class).value for part in one.severities]
            series.append(Series(name=one.family, x=x, y=average, color=color))
            series.append(Series(name=f"{one.family}, worst class", x=x, y=worst, color=color, dash="dash"))
        found.append(
            lines(
                series,
                title="Accuracy by severity, on average and in the worst class",
                alt=f"Curves of the accuracy of {values.model} over the severity of each family.",
                x="severity",
                y="accuracy, %",
                zero=True,
            )
        )
    return found
