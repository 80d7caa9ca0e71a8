"""Norms of the last layer's weights and class accuracies (Tian et al. 2021, ICLR submission, Fig. 4).

For each class c, ‖w_c‖₂ of the last linear layer next to the accuracy of the class, without attack and under attack.
The paper plots both min-max normalized and finds that they rise together in robust models, but not in standard ones,
for which it uses the natural accuracy. See ``correlation`` for intervals and p-values of the coefficients.
"""

# K classes, D features

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torch import nn

from classwise.analysis.correlation import Correlation, pearson, spearman
from classwise.analysis.model_outputs import linear_head
from classwise.analysis.plots import column_series
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run, condition, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.models.hypersphere import HypersphereHead
from classwise.reporting.figures import READABLE, Figure, Series, lines, points
from classwise.storage.verdicts import NATURAL


@dataclass(frozen=True, slots=True)
class Norms:
    """Weight norms of one model and their correlations with its accuracies."""

    model: str
    attack: str
    layer: str
    head: nn.Linear
    classes: pd.DataFrame
    """From the weakest class."""
    correlations: dict[tuple[str, str], Correlation]
    """By kind of accuracy, ``robust`` or ``natural``, and coefficient."""

    def __str__(self) -> str:
        found = self.correlations["robust", "spearman"]
        if found.value is None:
            return f"{self.model}: weight norms cannot be correlated with accuracies (too few classes, or no variation)"
        normalized = isinstance(self.head, HypersphereHead)
        return (
            f"{self.model}: the weight norm of a class and its accuracy {condition(self.attack)} have a Spearman "
            f"coefficient of {found.with_p}"
            f"{', although the layer divides the weights by their norm' if normalized else ''}"
        )


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
    models = [_norms(run, name, run.key(attack), seed) for run, name in zip(opened, unique_names(opened), strict=True)]
    correlations = [
        {
            "model": one.model,
            "accuracy": one.attack if kind == "robust" else NATURAL,
            "coefficient": coefficient,
            **interval_columns("value", found),
            "p_value": found.p_value,
            "classes": found.n,
        }
        for one in models
        for (kind, coefficient), found in one.correlations.items()
    ]
    classes = pd.concat([one.classes for one in models], ignore_index=True)
    return AnalysisResult(
        name="weight-norms",
        finding="; ".join(map(str, models)) + ".",
        about={
            "models": [one.model for one in models],
            "dataset": first.report.dataset.name,
            "layers": [{"name": one.layer, "features": one.head.in_features} for one in models],
            "seed": seed,
        },
        frames={"classes": classes, "correlations": frame_of(correlations)},
        draw=lambda: [*map(_class_figure, models), _scatter(models, "robust"), _scatter(models, "natural")],
    )


def scaled(values: pd.Series) -> pd.Series:
    """Scale to 0 for the smallest and 1 for the largest value; equal values become NaN.

    >>> scaled(pd.Series([2.0, None, 4.0, 3.0])).tolist()
    [0.0, nan, 1.0, 0.5]
    """
    return (values - values.min()) / (values.max() - values.min())


def _norms(run: Run, name: str, key: str, seed: int) -> Norms:
    layer, head = linear_head(run)
    norms = head.weight.detach().double().norm(dim=1).tolist()
    if len(norms) != run.num_classes:
        raise InputError(f"the model of {run.path} has {len(norms)} outputs for {run.num_classes} classes")
    robust, natural = run.report[key].by_class, run.report[NATURAL].by_class
    classes = frame_of(
        {
            "class": part.name,
            "label": part.label,
            "model": name,
            "attack": key,
            "weight_norm": norm,
            **interval_columns("robust_accuracy_percent", part),
            **interval_columns("natural_accuracy_percent", plain),
            "n": part.n,
        }
        for norm, part, plain in zip(norms, robust, natural, strict=True)
    )
    classes.insert(5, "weight_norm_scaled", scaled(classes["weight_norm"]))
    classes.insert(9, "robust_accuracy_scaled", scaled(classes["robust_accuracy_percent"]))
    correlations = {}
    for kind, parts in (("robust", robust), ("natural", natural)):
        accuracies = [part.value for part in parts]
        correlations[kind, "spearman"] = spearman(norms, accuracies, seed)
        correlations[kind, "pearson"] = pearson(norms, accuracies)
    return Norms(name, key, layer, head, classes.sort_values("robust_accuracy_percent", kind="stable"), correlations)


def _class_figure(one: Norms) -> Figure:
    known = one.classes.dropna(subset="robust_accuracy_percent")
    return lines(
        [
            Series(name="weight norm", y=list(known["weight_norm_scaled"])),
            Series(name=f"accuracy under {one.attack}", y=list(known["robust_accuracy_scaled"])),
        ],
        title=f"Weight norms and robust accuracy of {one.model}",
        alt=f"Scaled weight norm and robust accuracy of each class, from the weakest class. {one}.",
        x="class, weakest first",
        y="scaled to [0, 1]",
        zero=True,
        names=list(known["class"]),
    )


def _scatter(models: list[Norms], kind: str) -> Figure:
    few = len(models[0].classes) <= READABLE
    column, series = f"{kind}_accuracy_percent", []
    for one in models:
        rows = one.classes.sort_values("label")
        look = {"x": list(rows["weight_norm"]), "text": list(rows["class"])}
        series.append(column_series(one.model, rows if few else rows[[column]], column, **look))
    coefficients = "; ".join(f"{one.model}: {one.correlations[kind, 'spearman'].with_p}" for one in models)
    return points(
        series,
        title=f"{kind.capitalize()} accuracy by weight norm",
        alt=f"{kind.capitalize()} accuracy of each class over its weight norm. Spearman: {coefficients}.",
        x="norm of the class's weights",
        y=f"{kind} accuracy, %{' [95%]' if few else ''}",
    )
