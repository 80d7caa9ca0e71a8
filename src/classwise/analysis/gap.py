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

from pathlib import Path

from classwise.analysis.correlation import spearman
from classwise.analysis.plots import interval_series, shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import Run, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.figures import Figure, Series, bars
from classwise.storage.verdicts import NATURAL

QUANTITIES = ("average", "worst", "best", "cv", "mcd")


def gap(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Gap between classes of runs, against the first run. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2)
    key, comparison = compare_runs(opened, attack)
    if key == NATURAL:
        raise InputError("attack = 'natural'; the gap needs an attack")
    opened[0].require_classes(2)
    models: list[Record] = []
    for name, plain, attacked in zip(comparison.models, comparison[NATURAL], comparison[key], strict=True):
        natural, robust = _side(plain), _side(attacked)
        base = models[0] if models else None
        models.append(
            Record(
                model=name,
                natural=natural,
                robust=robust,
                natural_difference=base and _difference(natural, base.natural),
                robust_difference=base and _difference(robust, base.robust),
                growth=base and _growth(robust, base.natural),
            )
        )
    values = Record(
        dataset=comparison.dataset.name, attack=key, classes=list(comparison.dataset.classes), models=models
    )
    finding = _finding(values)
    return AnalysisResult(
        name="gap",
        finding=finding,
        values=values,
        frames={"models": frame_of(_row(one, kind, key) for kind in (NATURAL, "robust") for one in models)},
        draw=lambda: _figures(values, finding),
    )


def _side(row: Row) -> Record:
    """Return the numbers of one row of a comparison."""
    present = [part for part in row.by_class if part.value is not None]
    if not present or row.worst is None:
        raise InputError(f"{row.model} has no examples")
    best = max(present, key=lambda part: part.value or 0.0)
    worst = row.by_class[row.worst.label]
    return Record(average=row.overall, worst=worst, best=best, cv=row.cv, mcd=row.mcd, by_class=row.by_class)


def _numbers(side: Record) -> list[float]:
    return [side.average.value, side.worst.value, side.best.value, side.cv, side.mcd]


def _difference(side: Record, base: Record) -> Record:
    """Return the differences in points, for CV in percent²."""
    pairs = zip(QUANTITIES, _numbers(side), _numbers(base), strict=True)
    return Record({name: round(one - other, 4) for name, one, other in pairs})


def _growth(robust: Record, natural: Record) -> Record:
    """Return the factors between robust and natural CV and MCD, and Spearman's coefficient of the classes."""
    return Record(
        cv=round(robust.cv / natural.cv, 4) if natural.cv else None,
        mcd=round(robust.mcd / natural.mcd, 4) if natural.mcd else None,
        order=spearman([part.value for part in natural.by_class], [part.value for part in robust.by_class]),
    )


def _row(one: Record, kind: str, attack: str) -> dict[str, object]:
    side, difference = one[kind], one[f"{kind}_difference"] or {}
    return {
        "model": one.model,
        "attack": attack if kind == "robust" else NATURAL,
        **interval_columns("average_percent", side.average),
        **interval_columns("worst_class_percent", side.worst),
        "best_class_percent": side.best.value,
        "class_variance": side.cv,
        "max_class_difference_points": side.mcd,
        "worst_class": side.worst.name,
        "best_class": side.best.name,
        "average_change_points": difference.get("average"),
        "worst_class_change_points": difference.get("worst"),
        "max_class_difference_change_points": difference.get("mcd"),
    }


def _finding(values: Record) -> str:
    base, one = values.models[0], values.models[-1]
    growth = one.growth

    def times(factor: float | None) -> str:
        return "" if factor is None else f" ({factor:.1f} times)"

    order = "" if growth.order.value is None else f"; Spearman's coefficient of the classes is {growth.order.with_p}"
    return (
        f"{one.model} {condition(values.attack)} against {base.model} without attack: class variance "
        f"{base.natural.cv:.1f} → {one.robust.cv:.1f}{times(growth.cv)}, best minus worst class "
        f"{base.natural.mcd:.1f} → {one.robust.mcd:.1f} points{times(growth.mcd)}{order}."
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    base, others = values.models[0], values.models[1:]
    view = shown_classes([part.value for part in base.natural.by_class])
    names = ["all", *(values.classes[label] for label in view)]

    def series(name: str, side: Record) -> Series:
        return interval_series(name, [side.average, *(side.by_class[label] for label in view)])

    return [
        bars(
            names,
            [
                series(f"{base.model}, {NATURAL}", base.natural),
                *(series(f"{one.model}, {values.attack}", one.robust) for one in others),
            ],
            title=f"Natural against robust accuracy{shown_suffix(view, values.classes, f' of {base.model}')}",
            alt=f"Bars of the accuracy of each class on {values.dataset}. {finding}",
            y="accuracy, %",
        ),
        bars(
            [one.model for one in values.models],
            [
                Series(name=NATURAL, y=[one.natural.mcd for one in values.models]),
                Series(name=values.attack, y=[one.robust.mcd for one in values.models]),
            ],
            title="Best minus worst class (MCD)",
            alt=f"Bars of the maximum class difference. {finding}",
            x="model",
            y="MCD, points",
        ),
    ]
