"""Norms of the last layer's weights and class accuracies (Tian et al. 2021, ICLR submission, Fig. 4).

For each class c, ‖w_c‖₂ of the last linear layer next to the accuracy of the class, without attack and under attack.
The paper plots both min-max normalized and finds that they rise together in robust models, but not in standard ones,
for which it uses the natural accuracy. See ``correlation`` for intervals and p-values of the coefficients.
"""

# K classes, D features

from __future__ import annotations

from pathlib import Path

import numpy as np

from classwise.analysis.correlation import pearson, spearman
from classwise.analysis.model_outputs import linear_head
from classwise.analysis.plots import interval_series
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import Run, condition, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.models.hypersphere import HypersphereHead
from classwise.reporting.estimates import ClassEstimate
from classwise.reporting.figures import READABLE, Figure, Series, lines, points
from classwise.storage.verdicts import NATURAL


def weight_norms(*runs: Run | str | Path, attack: str | None = None, seed: int = 0) -> AnalysisResult:
    """Weight norms of one model, or of a robust and a standard one.

    ``attack``: one of the report, by default the worst case over all.
    """
    opened = open_runs(runs, 1, 2)
    first = opened[0]
    for run in opened:
        if run.classes != first.classes:
            raise InputError(f"{run.path} has other classes than {first.path}")
    first.require_classes(2)
    models = [_norms(run, name, attack, seed) for run, name in zip(opened, unique_names(opened), strict=True)]
    values = Record(dataset=first.report.dataset.name, classes=first.classes, models=models)
    return AnalysisResult(
        name="weight-norms",
        finding="; ".join(_finding(one) for one in models) + ".",
        values=values,
        frames={
            "classes": frame_of(_row(one, part) for one in models for part in _from_weakest(one)),
            "correlations": frame_of(
                {
                    "model": one.model,
                    "accuracy": one.attack if kind == "robust" else NATURAL,
                    "coefficient": name,
                    **interval_columns("value", one[kind][name]),
                    "p_value": one[kind][name].p_value,
                    "classes": one[kind][name].n,
                }
                for one in models
                for kind in ("robust", "natural")
                for name in ("spearman", "pearson")
            ),
        },
        draw=lambda: _figures(values),
    )


def scaled(values: list[float] | list[float | None]) -> list[float | None]:
    """Scale to 0 for the smallest and 1 for the largest value; None stays None, and equal values become None.

    >>> scaled([2.0, None, 4.0, 3.0])
    [0.0, None, 1.0, 0.5]
    """
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), np.ptp(known) if known else 0.0
    return [None if value is None or span == 0 else float((value - low) / span) for value in values]


def _norms(run: Run, name: str, attack: str | None, seed: int) -> Record:
    key = run.key(attack)
    layer, head = linear_head(run)
    norms = [float(value) for value in head.weight.detach().double().norm(dim=1).cpu()]
    if len(norms) != run.num_classes:
        raise InputError(f"the model of {run.path} has {len(norms)} outputs for {run.num_classes} classes")
    robust, natural = run.report[key].by_class, run.report[NATURAL].by_class
    strengths = scaled([part.value for part in robust])

    def relation(parts: list[ClassEstimate]) -> Record:
        accuracies = [part.value for part in parts]
        return Record(pearson=pearson(norms, accuracies), spearman=spearman(norms, accuracies, seed))

    return Record(
        model=name,
        attack=key,
        layer=layer,
        features=head.in_features,
        normalized=isinstance(head, HypersphereHead),
        by_class=[
            Record(norm=norm, norm_scaled=long, natural=part, robust=attacked, robust_scaled=strong)
            for norm, long, part, attacked, strong in zip(norms, scaled(norms), natural, robust, strengths, strict=True)
        ],
        robust=relation(robust),
        natural=relation(natural),
    )


def _from_weakest(one: Record) -> list[Record]:
    return sorted(one.by_class, key=lambda part: (part.robust.value is None, part.robust.value or 0.0))


def _row(one: Record, part: Record) -> dict[str, object]:
    return {
        "class": part.robust.name,
        "label": part.robust.label,
        "model": one.model,
        "attack": one.attack,
        "weight_norm": part.norm,
        "weight_norm_scaled": part.norm_scaled,
        **interval_columns("robust_accuracy_percent", part.robust),
        "robust_accuracy_scaled": part.robust_scaled,
        **interval_columns("natural_accuracy_percent", part.natural),
        "n": part.robust.n,
    }


def _finding(one: Record) -> str:
    if one.robust.spearman.value is None:
        return f"{one.model}: weight norms cannot be correlated with accuracies (too few classes, or no variation)"
    unused = ", although the layer divides the weights by their norm" if one.normalized else ""
    return (
        f"{one.model}: the weight norm of a class and its accuracy {condition(one.attack)} have a Spearman coefficient "
        f"of {one.robust.spearman.with_p}{unused}"
    )


def _figures(values: Record) -> list[Figure]:
    found = []
    for one in values.models:
        parts = [part for part in _from_weakest(one) if part.robust.value is not None]
        found.append(
            lines(
                [
                    Series(name="weight norm", y=[part.norm_scaled for part in parts]),
                    Series(name=f"accuracy under {one.attack}", y=[part.robust_scaled for part in parts]),
                ],
                title=f"Weight norms and robust accuracy of {one.model}",
                alt=f"Scaled weight norm and robust accuracy of each class, from the weakest class. {_finding(one)}.",
                x="class, weakest first",
                y="scaled to [0, 1]",
                zero=True,
                names=[part.robust.name for part in parts],
            )
        )
    few = len(values.classes) <= READABLE
    for kind in ("robust", "natural"):
        series = []
        for one in values.models:
            parts = [part[kind] for part in one.by_class]
            look = {"x": [part.norm for part in one.by_class], "text": values.classes}
            plain = Series(name=one.model, y=[part.value for part in parts], **look)
            series.append(interval_series(one.model, parts, **look) if few else plain)
        coefficients = "; ".join(f"{one.model}: {one[kind].spearman.with_p}" for one in values.models)
        found.append(
            points(
                series,
                title=f"{kind.capitalize()} accuracy by weight norm",
                alt=f"{kind.capitalize()} accuracy of each class over its weight norm. Spearman: {coefficients}.",
                x="norm of the class's weights",
                y=f"{kind} accuracy, %{' [95%]' if few else ''}",
            )
        )
    return found
