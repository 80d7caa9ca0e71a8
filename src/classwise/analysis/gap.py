"""Gap between classes with and without adversarial training (Tian et al. 2021, Table 5; ICLR Appendix C, Fig. 7).

The paper compares the natural accuracy of a standard model with the robust accuracy of an adversarially trained one:
the class variance (CV) and the maximum class difference (MCD) grow several times, and the order of the classes stays
almost the same. Here the first run is the baseline, a standard model in the paper. Every other run is compared with it
twice: natural with natural and robust with robust, and its robust accuracy with the baseline's natural one, as in the
paper.

CV and MCD of few examples per class are too large because of sampling noise.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from classwise.analysis.correlation import Correlation, spearman
from classwise.analysis.plots import shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.figures import Figure, Series, bars
from classwise.reporting.report import DatasetInfo
from classwise.storage.verdicts import NATURAL

CHANGES = {
    "average_change_points": "average_percent",
    "worst_class_change_points": "worst_class_percent",
    "max_class_difference_change_points": "max_class_difference_points",
}
"""Columns with the differences to the first run, and what they are differences of."""


def gap(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Gap between classes of runs, against the first run. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2)
    key, comparison = compare_runs(opened, attack)
    if key == NATURAL:
        raise InputError("attack = 'natural'; the gap needs an attack")
    opened[0].require_classes(2)
    sides, dataset = {kind: comparison[kind] for kind in (NATURAL, key)}, comparison.dataset
    base, others = sides[NATURAL][0], sides[key][1:]
    frame = frame_of(_row(row, kind) for kind, rows in sides.items() for row in rows)
    for change, column in CHANGES.items():
        first = frame.groupby("attack")[column].transform("first")
        frame[change] = (frame[column] - first).round(4).where(frame["model"] != base.model)
    orders = [spearman(base.shares, row.shares) for row in others]
    growth = frame_of(
        {
            "model": row.model,
            "class_variance_factor": _factor(row.cv, base.cv),
            "max_class_difference_factor": _factor(row.mcd, base.mcd),
            **interval_columns("spearman", order),
            "p_value": order.p_value,
        }
        for row, order in zip(others, orders, strict=True)
    )
    finding = _finding(others[-1], base, key, orders[-1])
    return AnalysisResult(
        name="gap",
        finding=finding,
        about={"models": comparison.models, "dataset": dataset.name, "attack": key, "classes": dataset.classes},
        frames={"models": frame, "growth": growth},
        draw=lambda: _figures(sides, dataset, finding),
    )


def _factor(robust: float | None, natural: float | None) -> float | None:
    return round(robust / natural, 4) if robust is not None and natural else None


def _row(row: Row, attack: str) -> dict[str, object]:
    present = [part for part in row.by_class if part.value is not None]
    if not present or row.worst is None:
        raise InputError(f"{row.model} has no examples")
    best = max(present, key=lambda part: part.value or 0.0)
    worst = row.by_class[row.worst.label]
    return {
        "model": row.model,
        "attack": attack,
        **interval_columns("average_percent", row.overall),
        **interval_columns("worst_class_percent", worst),
        "best_class_percent": best.value,
        "class_variance": row.cv,
        "max_class_difference_points": row.mcd,
        "worst_class": worst.name,
        "best_class": best.name,
    }


def _finding(row: Row, base: Row, attack: str, order: Correlation) -> str:
    def times(robust: float | None, natural: float | None) -> str:
        factor = _factor(robust, natural)
        return "" if factor is None else f" ({factor:.1f} times)"

    spearman_text = "" if order.value is None else f"; Spearman's coefficient of the classes is {order.with_p}"
    return (
        f"{row.model} {condition(attack)} against {base.model} without attack: class variance (CV) "
        f"{base.cv:.1f} → {row.cv:.1f}{times(row.cv, base.cv)}, maximum class difference (MCD) "
        f"{base.mcd:.1f} → {row.mcd:.1f} points{times(row.mcd, base.mcd)}{spearman_text}."
    )


def _figures(sides: Mapping[str, Sequence[Row]], dataset: DatasetInfo, finding: str) -> list[Figure]:
    natural, robust = sides.values()
    view = shown_classes(natural[0].shares)
    attack = list(sides)[1]
    return [
        bars(
            ["all", *(dataset.classes[label] for label in view)],
            [
                Series.of(f"{row.model}, {kind}", [row.overall, *(row.by_class[label] for label in view)])
                for kind, row in [(NATURAL, natural[0]), *((attack, row) for row in robust[1:])]
            ],
            title=f"Natural against robust accuracy{shown_suffix(view, dataset.classes, f' of {natural[0].model}')}",
            alt=f"Bars of the accuracy of each class on {dataset.name}. {finding}",
            y="accuracy, %",
        ),
        bars(
            [row.model for row in natural],
            [Series(name=kind, y=[row.mcd for row in rows]) for kind, rows in sides.items()],
            title="Maximum class difference (MCD)",
            alt=f"Bars of the MCD. {finding}",
            x="model",
            y="MCD, points",
        ),
    ]
