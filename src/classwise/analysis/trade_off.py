"""Trade-off between average and worst class: sweeps of one class's weight or beta, or a comparison of runs.

Weights as in Li & Liu 2023, Fig. 3, betas as in Tian et al. 2021, Fig. 4c. For one run, its recipe is trained for every
value of the sweep, into ``work/<turn>-<label>-<value>``; several runs are compared as they are. A model is on the
Pareto front if no other has a better average and a better worst class. Whether close models are on the front is partly
chance.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd

from classwise.analysis.plots import column_series
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run, condition
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.reporting.charts import front
from classwise.reporting.estimates import share
from classwise.reporting.figures import Figure, Series, lines, points
from classwise.training.plan import make_objective

Turn = Literal["weight", "beta"]
POLICIES = {"weight": ("fixed-weights", "weights"), "beta": ("beta-vector", "beta")}
"""Policy and its setting that change a class's weight or beta."""


def trade_off(
    *runs: Run | str | Path,
    turn: Turn = "weight",
    label: str | int | None = None,
    values: Sequence[Number] = (0.5, 1.0, 2.0, 4.0),
    attack: str | None = None,
    work: Path | None = None,
    workers: int = 1,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Sweep one class's weight or beta from a run's recipe, or compare several runs.

    ``label`` is the class to change, by name or number, by default the worst class of the run. A weight is relative to
    the other classes' weight of 1; a beta replaces that of the objective for the class.
    """
    opened = [Run.open(run) for run in runs]
    if not opened:
        raise InputError("trade-off needs one run for a sweep, or several runs to compare")
    if len(opened) > 1:
        return _result(opened[0].key(attack), [(run.name, None, run) for run in opened])
    (run,) = opened
    recipe = recipe_of(run)
    key = repeatable_attack(run, attack)
    chosen = run.label_of(label, key)
    if not values:
        raise InputError("values is empty; expected at least one value")
    if recipe.policy["name"] != "uniform":
        raise InputError(
            f"the run has the policy {recipe.policy['name']!r}; a sweep needs a run with the uniform policy"
        )
    folder = run.path / "trade-off" if work is None else work
    places = {value: folder / f"{turn}-{chosen}-{value:g}" for value in values}
    policy, setting = POLICIES[turn]
    changes = {place: {"policy": {"name": policy, setting: {str(chosen): value}}} for value, place in places.items()}
    train_variants(run, changes, workers=workers, progress=progress)
    swept = [
        (f"{turn} {value:g}", float(value), evaluate_variant(run, place, attack=key, progress=progress))
        for value, place in places.items()
    ]
    own = 1.0 if turn == "weight" else make_objective(recipe).beta
    return _result(key, [(run.name, own, run), *swept], f"{turn} of class {run.classes[chosen]}", chosen)


def _result(
    key: str, models: list[tuple[str, float | None, Run]], turned: str = "", label: int | None = None
) -> AnalysisResult:
    rows, by_class, worst = [], [], []
    for name, value, run in models:
        result = run.report[run.key(key)]
        if result.worst is None:
            raise InputError(f"{run.path} has no examples that were attacked")
        worst.append(result.worst)
        row = {"model": name, "value": value}
        ends = interval_columns("average_percent", result.overall) | interval_columns("worst_class_percent", worst[-1])
        rows.append(row | ends | {"worst_class": worst[-1].name})
        by_class += [
            row | {"label": part.label, "class": part.name} | interval_columns("accuracy_percent", part) | {"n": part.n}
            for part in result.by_class
        ]
    frame, classes = frame_of(rows), frame_of(by_class)
    average = frame["average_percent"]
    kept = front(list(zip(average, frame["worst_class_percent"], strict=True)))
    frame["pareto_front"] = frame.index.isin(kept)
    best = int(frame["worst_class_percent"].idxmax())
    gains = f"{worst[best].value - worst[0].value:+.1f} and {average[best] - average[0]:+.1f}"
    finding = (
        f"{models[best][0]} has the highest worst class {condition(key)}: {share(worst[best], '%')} "
        f"({worst[best].name}) at an average of {average[best]:.1f}%"
        f"{f', {gains} points against {models[0][0]}' if best else ''}."
    )
    swept = [_sweep_figure(key, frame, classes[classes["label"] == label], turned, finding)] if turned else []
    return AnalysisResult(
        name="trade-off",
        finding=finding,
        about={"models": list(frame["model"]), "attack": key, "turned": turned or None, "label": label},
        frames={"classes": classes, "models": frame},
        draw=lambda: [_front_figure(key, frame.iloc[kept], frame.drop(kept), finding), *swept],
    )


def _front_figure(key: str, kept: pd.DataFrame, others: pd.DataFrame, finding: str) -> Figure:
    series = [
        column_series(name, rows, "worst_class_percent", x=list(rows["average_percent"]), text=list(rows["model"]))
        for name, rows in (("Pareto front", kept), ("others", others))
        if len(rows)
    ]
    return points(
        series,
        title="Average against worst class",
        alt=f"Average and worst-class accuracy under {key}. {finding}",
        x="average robust accuracy, %",
        y="accuracy of the worst class, %",
        joined=["Pareto front"],
    )


def _sweep_figure(key: str, models: pd.DataFrame, own: pd.DataFrame, turned: str, finding: str) -> Figure:
    models, own = (rows.sort_values("value", kind="stable") for rows in (models, own))
    x = list(models["value"])
    return lines(
        [
            Series(name="average", x=x, y=list(models["average_percent"])),
            Series(name="worst class", x=x, y=list(models["worst_class_percent"])),
            column_series(f"class {own['class'].iloc[0]}", own, "accuracy_percent", x=x),
        ],
        title=f"Accuracy by {turned}",
        alt=f"Accuracy under {key} by {turned}. {finding}",
        x=turned,
        y="accuracy under attack, %",
        zero=True,
    )
