"""Class accuracies under corruptions and under attack (Benz et al. 2020, Section 3.4).

Accuracies are means over the corruptions of a family, at one severity or at all. The interval of a class takes images,
not corrupted copies, as its sample. Pearson's and Spearman's coefficients relate the class accuracies under each family
to those under attack (see ``correlation``). The natural accuracy is listed with the families, because differences
between classes that exist on natural images are not due to a corruption.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from classwise.analysis.correlation import Correlation, pearson, spearman
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run, condition
from classwise.core.errors import InputError
from classwise.metrics import class_variance, max_class_difference
from classwise.reporting.corruptions import CorruptionResult, FamilyResult
from classwise.reporting.estimates import ClassEstimate, Estimate, estimate
from classwise.reporting.figures import SERIES_COLORS, Figure, Series, heatmap, lines
from classwise.storage.verdicts import NATURAL


def corruptions(run: Run | str | Path, *, attack: str | None = None, seed: NonNegativeInt = 0) -> AnalysisResult:
    """Class accuracies under corruptions and under ``attack``, by default the worst case over all."""
    run = Run.open(run)
    report = run.report
    if report.corruptions is None:
        raise InputError(f"{run.path} was evaluated without corruptions: add --attack corruptions to the evaluation")
    key, families, results = run.key(attack), report.corruptions.families, report.corruptions.results
    if not any(part.n for part in report[key].by_class):
        raise InputError(f"{run.path} has no examples")
    natural, attacked = (
        FamilyResult(family=one, overall=report[one].overall, by_class=report[one].by_class) for one in (NATURAL, key)
    )
    parts, robust = [natural, *families, attacked], _shares(attacked)
    severities = [_by_severity([one for one in results if one.family == part.family]) for part in families]
    orders = [spearman(_shares(part), robust, seed) for part in parts]
    finding = _finding(attacked, key, families, orders[1:-1])
    return AnalysisResult(
        name="corruptions",
        finding=finding,
        about={
            "model": run.name,
            "dataset": report.dataset.name,
            "attack": key,
            "corruptions": {
                part.family: list(dict.fromkeys(one.kind for one in results if one.family == part.family))
                for part in families
            },
            "seed": seed,
        },
        frames={
            "classes": frame_of(
                {
                    "family": part.family,
                    "severity": severity,  # none for the mean over all
                    "label": one.label,
                    "class": one.name,
                    **interval_columns("accuracy_percent", one),
                    "n": one.n,
                }
                for part, means in zip(parts, [{}, *severities, {}], strict=True)
                for severity, mean in [(None, part), *means.items()]
                for one in mean.by_class
            ).astype({"severity": "Int64"}),
            "families": frame_of(
                _row(part, pearson(_shares(part), robust), order) for part, order in zip(parts, orders, strict=True)
            ),
        },
        draw=lambda: _figures(run, parts, severities, finding),
    )


def _shares(part: FamilyResult) -> list[float | None]:
    return [one.value for one in part.by_class]


def _worst(by_class: Sequence[ClassEstimate]) -> ClassEstimate:
    return min((part for part in by_class if part.value is not None), key=lambda part: part.value or 0.0)


def _by_severity(results: Sequence[CorruptionResult]) -> dict[int, FamilyResult]:
    """Return the means over the corruptions of a family at each severity."""
    severities = sorted({one.severity for one in results})
    return {severity: _mean([one for one in results if one.severity == severity]) for severity in severities}


def _mean(results: Sequence[CorruptionResult]) -> FamilyResult:
    """Return the means over corruptions of the same images."""

    def mean(parts: Sequence[Estimate]) -> dict[str, Any]:
        n = parts[0].n
        correct = sum(round((part.value or 0.0) * n / 100) for part in parts)  # shares in reports are rounded
        return estimate(correct / len(parts), n)

    by_class = [
        ClassEstimate(label=parts[0].label, name=parts[0].name, **mean(parts))
        for parts in zip(*(one.by_class for one in results), strict=True)
    ]
    overall = Estimate(**mean([one.overall for one in results]))
    return FamilyResult(family=results[0].family, overall=overall, by_class=by_class)


def _row(part: FamilyResult, linear: Correlation, order: Correlation) -> dict[str, object]:
    worst, known = _worst(part.by_class), [share for share in _shares(part) if share is not None]
    return {
        "family": part.family,
        **interval_columns("average_percent", part.overall),
        **interval_columns("worst_class_percent", worst),
        "worst_class": worst.name,
        "class_variance": round(class_variance(known) or 0.0, 4),
        "max_class_difference_points": round(max_class_difference(known) or 0.0, 4),
        **interval_columns("pearson_with_attack", linear),
        **interval_columns("spearman_with_attack", order),
        "spearman_p_value": order.p_value,
    }


def _finding(
    attacked: FamilyResult, attack: str, families: Sequence[FamilyResult], orders: Sequence[Correlation]
) -> str:
    weak = _worst(attacked.by_class)
    same = sum(_worst(part.by_class).label == weak.label for part in families)
    sentence = (
        f"The worst class {condition(attack)}, {weak.name} ({weak.value:.1f}%), is the worst under {same} of "
        f"{len(families)} families of corruptions"
    )
    known = [(part, order) for part, order in zip(families, orders, strict=True) if order.value is not None]
    if not known:
        return f"{sentence}; class accuracies cannot be correlated (too few classes, or no variation)."
    most, order = max(known, key=lambda pair: abs(pair[1].value or 0.0))
    return f"{sentence}; class accuracies correlate most under {most.family}, with Spearman {order.with_p}."


def _figures(
    run: Run, parts: Sequence[FamilyResult], severities: Sequence[Mapping[int, FamilyResult]], finding: str
) -> list[Figure]:
    found = [
        heatmap(
            [list(row) for row in zip(*map(_shares, parts), strict=True)],
            title="Accuracy by class and family",
            alt=f"Accuracy of each class of {run.name} on {run.report.dataset.name}. {finding}",
            names=run.classes,
            columns=[part.family for part in parts],
            x="family",
            y="class",
            unit="%",
            digits=1,
            span=(0, 100),
        )
    ]
    if any(len(means) > 1 for means in severities):
        series = []
        for place, (part, means) in enumerate(zip(parts[1:-1], severities, strict=True)):
            x, color = list(means), SERIES_COLORS[place % len(SERIES_COLORS)]
            average = [mean.overall.value for mean in means.values()]
            worst = [_worst(mean.by_class).value for mean in means.values()]
            series.append(Series(name=part.family, x=x, y=average, color=color))
            series.append(Series(name=f"{part.family}, worst class", x=x, y=worst, color=color, dash="dash"))
        found.append(
            lines(
                series,
                title="Accuracy by severity, on average and in the worst class",
                alt=f"Curves of the accuracy of {run.name} over the severity of each family.",
                x="severity",
                y="accuracy, %",
                zero=True,
            )
        )
    return found
