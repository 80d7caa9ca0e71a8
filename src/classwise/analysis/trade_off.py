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

from classwise.analysis.plots import interval_series
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run, condition
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
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
        return _result(opened[0].key(attack), None, None, [(run.name, None, run) for run in opened])
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
    return _result(key, f"{turn} of class {run.classes[chosen]}", chosen, [(run.name, own, run), *swept])


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether one point is at least as good in both coordinates and better in one.

    >>> dominates((50.0, 20.0), (49.0, 20.0)), dominates((50.0, 20.0), (50.0, 20.0))
    (True, False)
    """
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def _result(
    key: str, turned: str | None, label: int | None, models: list[tuple[str, float | None, Run]]
) -> AnalysisResult:
    settings = []
    for name, value, run in models:
        run.key(key)
        result = run.report[key]
        if result.worst is None or result.overall.value is None:
            raise InputError(f"{run.path} has no examples that were attacked")
        settings.append(
            Record(name=name, value=value, average=result.overall, worst=result.worst, by_class=result.by_class)
        )
    places = [(one.average.value, one.worst.value) for one in settings]
    for one, place in zip(settings, places, strict=True):
        one["front"] = not any(dominates(other, place) for other in places)
    values = Record(attack=key, turned=turned, label=label, settings=settings)
    best, first = max(settings, key=lambda one: float(one.worst.value)), settings[0]
    change = (
        ""
        if best is first
        else f", {best.worst.value - first.worst.value:+.1f} and {best.average.value - first.average.value:+.1f} "
        f"points against {first.name}"
    )
    finding = (
        f"{best.name} has the highest worst class {condition(key)}: {share(best.worst, '%')} ({best.worst.name}) at an "
        f"average of {best.average.value:.1f}%{change}."
    )
    models_frame = [
        {
            "model": one.name,
            "value": one.value,
            **interval_columns("average_percent", one.average),
            **interval_columns("worst_class_percent", one.worst),
            "worst_class": one.worst.name,
            "pareto_front": one.front,
        }
        for one in settings
    ]
    by_class = [
        {
            "model": one.name,
            "value": one.value,
            "label": part.label,
            "class": part.name,
            **interval_columns("accuracy_percent", part),
            "n": part.n,
        }
        for one in settings
        for part in one.by_class
    ]
    frames = {"classes": frame_of(by_class), "models": frame_of(models_frame)}
    return AnalysisResult(
        name="trade-off", finding=finding, values=values, frames=frames, draw=lambda: _figures(values, finding)
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    front = sorted((one for one in values.settings if one.front), key=lambda one: float(one.average.value))
    others = [one for one in values.settings if not one.front]

    def series(name: str, some: Sequence[Record]) -> Series:
        x, names = [one.average.value for one in some], [one.name for one in some]
        return interval_series(name, [one.worst for one in some], x=x, text=names)

    figures = [
        points(
            [series("Pareto front", front), *([series("others", others)] if others else [])],
            title="Average against worst class",
            alt=f"Average and worst-class accuracy under {values.attack}. {finding}",
            x="average robust accuracy, %",
            y="accuracy of the worst class, %",
            joined=["Pareto front"],
        )
    ]
    swept = sorted((one for one in values.settings if one.value is not None), key=lambda one: float(one.value))
    if len(swept) > 1 and values.label is not None:
        x, own = [one.value for one in swept], [one.by_class[values.label] for one in swept]
        figures.append(
            lines(
                [
                    Series(name="average", x=x, y=[one.average.value for one in swept]),
                    Series(name="worst class", x=x, y=[one.worst.value for one in swept]),
                    interval_series(f"class {own[0].name}", own, x=x),
                ],
                title=f"Accuracy by {values.turned}",
                alt=f"Accuracy under {values.attack} by {values.turned}. {finding}",
                x=values.turned,
                y="accuracy under attack, %",
                zero=True,
            )
        )
    return figures
