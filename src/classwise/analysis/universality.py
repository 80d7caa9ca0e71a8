"""Whether the same classes are weak for different architectures, optimizers, schedules and weight decays (Benz et al.
2020).

Runs whose recipes differ only in the seed are one **setting**. The agreement of two settings is the mean of Spearman's
coefficient between the class accuracies of a run of one and a run of the other; runs with the same seed share their
data split and are paired only if there are no others. The same mean over pairs of runs within a setting is the
agreement between seeds. It limits what can be expected between settings: their **ceiling** is the geometric mean of the
agreements within each (Spearman 1904, attenuation). At the ceiling, the change of setting affects the order of the
classes no more than a change of seed; without a ceiling a low agreement cannot be interpreted.

Intervals are percentile bootstraps, 95%: examples are resampled within classes, the same for every run, and runs within
settings. Classes are not resampled: the result is about these classes. Resampled coefficients are slightly lower
because of added noise; with two or three runs per setting, the part of the interval that comes from runs is too narrow.
"""

# N examples, K classes, R runs, S settings

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from classwise.analysis.correlation import FEWEST, Floats
from classwise.analysis.plots import shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, format_number, frame_of, interval_columns
from classwise.analysis.retraining import recipe_if_trained
from classwise.analysis.run import Run, capitalized, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.figures import Figure, heatmap
from classwise.reporting.formatting import class_name
from classwise.reporting.part import Part

RESAMPLES = 1000
SEVERAL = "several keys"
UNKNOWN = "unknown keys"


class Agreement(Part):
    """A mean of coefficients, or a difference of two, with its interval; null if no pair of runs has one."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return ("–" if self.value is None else f"{self.value:.2f}") + interval


def universality(*runs: Run | str | Path, attack: str | None = None, seed: int = 0) -> AnalysisResult:
    """Agreement of runs on the order of the classes. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2)
    key, comparison = compare_runs(opened, attack)
    if not comparison.paired:
        raise InputError("the runs were not all evaluated on the same examples; agreement needs that")
    labels, classes = opened[0].verdicts.label, comparison.dataset.classes
    order = np.argsort(labels, kind="stable")
    survived = np.stack([run.verdicts.survived(key)[order] for run in opened], 1)  # (N, R)
    present, begin, n = np.unique(labels[order], return_index=True, return_counts=True)
    if len(present) < FEWEST:
        raise InputError(f"the runs have examples of {len(present)} classes; agreement needs at least {FEWEST}")
    recipes = [_recipe(run) for run in opened]
    member, settings = _grouped(recipes)  # (R,) and the recipe of each setting
    pairing = _Pairing(member, [None if recipe is None else recipe["seed"] for recipe in recipes])

    shares = _class_accuracies(survived, begin, n)
    coefficients = _coefficients(shares)
    found = pairing.means(coefficients, np.ones(len(opened)))
    random = np.random.default_rng(seed)
    drawn = np.empty((RESAMPLES, *found.shape))
    for one in drawn:
        examples = np.repeat(begin, n) + (random.random(len(labels)) * np.repeat(n, n)).astype(np.int64)
        again = _coefficients(_class_accuracies(survived[examples], begin, n))
        one[:] = pairing.means(again, pairing.drawn(random))

    names = _setting_names(comparison.models, recipes, member)
    by_class: list[list[float | None]] = [[None] * len(classes) for _ in settings]
    means = np.stack([shares[:, member == place].mean(1) for place in range(len(settings))])
    for place, row in enumerate(means):
        for label, value in zip(present, row, strict=True):
            by_class[place][label] = round(100 * float(value), 4)
    between = [(i, j) for i in range(len(settings)) for j in range(i + 1, len(settings))]
    changed = {(i, j): _changed(settings[i], settings[j]) for i, j in between}
    ceilings = _ceilings(found)
    values = Record(
        dataset=comparison.dataset.name,
        attack=key,
        classes=list(classes),
        settings=[
            Record(
                name=names[place],
                changed=[] if place == 0 else changed[0, place],
                runs=[run for run, own in zip(comparison.models, member, strict=True) if own == place],
                average=round(100 * float(survived[:, member == place].mean()), 4),
                by_class=by_class[place],
                weakest=int(present[means[place].argmin()]),
                within=_agreement(found[place, place], drawn[:, place, place]),
            )
            for place in range(len(settings))
        ],
        pairs=[
            Record(
                one=names[i],
                other=names[j],
                changed=changed[i, j],
                agreement=_agreement(found[i, j], drawn[:, i, j]),
                ceiling=_known(ceilings[i, j]),
            )
            for i, j in between
        ],
        changes=_changes(changed, found, drawn),
        runs=comparison.models,
        coefficients=[[_known(value) for value in row] for row in coefficients],
    )
    finding = _finding(values)
    return AnalysisResult(
        name="universality",
        finding=finding,
        values=values,
        frames={
            "runs": _run_frame(values),
            "settings": _setting_frame(values),
            "changes": frame_of(
                {
                    "changed": change.what,
                    "pairs": change.pairs,
                    **interval_columns("agreement", change.agreement),
                    "ceiling": change.ceiling,
                    **interval_columns("ceiling_minus_agreement", change.lost),
                }
                for change in values.changes
            ),
        },
        draw=lambda: _figures(values, finding),
    )


class _Pairing:
    """The pairs of runs that are compared for each pair of settings."""

    def __init__(self, member: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        self.member = member
        self.of = (np.arange(member.max() + 1)[:, None] == member).astype(np.float64)  # (S, R)
        distinct = np.array([[a is None or a != b for b in seeds] for a in seeds])
        distinct &= ~np.eye(len(seeds), dtype=bool)
        none = (self.of @ distinct @ self.of.T == 0) & ~np.eye(len(self.of), dtype=bool)
        self.allowed = distinct | none[np.ix_(member, member)]

    def means(self, coefficients: Floats, times: Floats) -> Floats:
        """Return (S, S) mean coefficients over pairs, with each run counted ``times``; NaN without pairs."""
        counted = self.of * times
        weight = self.allowed & ~np.isnan(coefficients)
        total = counted @ weight @ counted.T
        sums = counted @ np.where(weight, coefficients, 0.0) @ counted.T
        return np.where(total > 0, sums / np.maximum(total, 1), np.nan)

    def drawn(self, random: np.random.Generator) -> Floats:
        """Return (R,) how often each run is drawn when every setting resamples its runs."""
        times = np.zeros(len(self.member))
        for own in self.of.astype(bool):
            times[own] = random.multinomial(own.sum(), np.full(own.sum(), 1 / own.sum()))
        return times


def _class_accuracies(survived: NDArray[np.bool_], begin: NDArray[np.int64], n: NDArray[np.int64]) -> Floats:
    """Return (K, R) accuracies from examples sorted by class."""
    return np.asarray(np.add.reduceat(survived, begin, 0, dtype=np.int64) / n[:, None])


def _coefficients(accuracies: Floats) -> Floats:
    """Return (R, R) Spearman's coefficients; NaN for a run whose classes are all equal."""
    ranks = rankdata(accuracies, axis=0)
    ranks -= ranks.mean(0)
    length = np.linalg.norm(ranks, axis=0)
    ranks = np.divide(ranks, length, out=np.full_like(ranks, np.nan), where=length > 0)
    return np.asarray(np.clip(ranks.T @ ranks, -1, 1))


def _ceilings(means: Floats) -> Floats:
    """Return (..., S, S) geometric means of the agreements within two settings; NaN if one is not positive."""
    within = np.diagonal(means, axis1=-2, axis2=-1)
    root = np.sqrt(np.where(within > 0, within, np.nan))
    return np.asarray(root[..., :, None] * root[..., None, :])


def _changes(changed: Mapping[tuple[int, int], list[str]], found: Floats, drawn: Floats) -> list[Record]:
    groups: dict[str, list[tuple[int, int]]] = {}
    for pair, keys in changed.items():
        groups.setdefault(keys[0] if len(keys) == 1 else SEVERAL, []).append(pair)
    ceilings, drawn_ceilings = _ceilings(found), _ceilings(drawn)
    changes = []
    for what, pairs in groups.items():
        i, j = np.array(pairs).T
        bounded = ~np.isnan(ceilings[i, j])
        lost = (ceilings - found)[i, j][bounded]
        drawn_lost = (drawn_ceilings - drawn)[:, i, j][:, bounded]
        changes.append(
            Record(
                what=what,
                pairs=len(pairs),
                agreement=_agreement(_mean_known(found[i, j]), _mean_known(drawn[:, i, j])),
                ceiling=_known(_mean_known(ceilings[i, j])),
                lost=_agreement(_mean_known(lost), _mean_known(drawn_lost)),
            )
        )
    return changes


def _agreement(value: Floats, drawn: Floats) -> Agreement:
    """Return a mean with the middle 95% of its resampled values."""
    known = drawn[~np.isnan(drawn)]
    if np.isnan(value) or not len(known):
        return Agreement(value=_known(value), low=None, high=None)
    low, high = np.quantile(known, [0.025, 0.975])
    return Agreement(value=_known(value), low=_known(low), high=_known(high))


def _recipe(run: Run) -> dict[str, Any] | None:
    recipe = recipe_if_trained(run)
    return None if recipe is None else recipe.model_dump(exclude={"name"})


def _grouped(recipes: Sequence[dict[str, Any] | None]) -> tuple[NDArray[np.int64], list[dict[str, Any] | None]]:
    """Return (R,) the setting of each run, and their recipes; a run without a recipe is its own setting."""
    settings: list[dict[str, Any] | None] = []
    member = []
    for recipe in recipes:
        setting = None if recipe is None else {key: value for key, value in recipe.items() if key != "seed"}
        if setting is None or setting not in settings:
            settings.append(setting)
        member.append(len(settings) - 1 if setting is None else settings.index(setting))
    return np.array(member), settings


def _changed(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """Return the keys in which two recipes differ; for tables of the same name, their inner keys."""
    if one is None or other is None:
        return [UNKNOWN]
    keys = []
    for key in one:
        ours, theirs = one[key], other[key]
        tables = isinstance(ours, Mapping) and isinstance(theirs, Mapping)
        if ours == theirs:
            continue
        if tables and ours.get("name") == theirs.get("name"):
            keys += [f"{key}.{inner}" for inner in {**ours, **theirs} if ours.get(inner) != theirs.get(inner)]
        else:
            keys.append(key)
    return keys


def _setting_names(
    runs: Sequence[str], recipes: Sequence[Mapping[str, Any] | None], member: NDArray[np.int64]
) -> list[str]:
    """Return the name of each setting: its first run, without the seed if the names stay distinct."""
    first = [int(np.argmax(member == place)) for place in range(member.max() + 1)]
    bare = [runs[run].removesuffix(f"-{(recipes[run] or {}).get('seed')}") for run in first]
    return bare if len(set(bare)) == len(bare) else [runs[run] for run in first]


def _mean_known(values: Floats) -> Floats:
    """Return the mean over the last axis without NaN; NaN if all are."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(-1)
    return np.asarray(np.where(known.any(-1), total / np.maximum(known.sum(-1), 1), np.nan))


def _known(value: float | Floats) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)


def _run_frame(values: Record) -> pd.DataFrame:
    """Return one row for each pair of runs."""
    setting = {run: one.name for one in values.settings for run in one.runs}
    rows = [
        {"run": one, "other_run": other, "setting": setting[one], "other_setting": setting[other], "spearman": value}
        for place, one in enumerate(values.runs)
        for other, value in zip(values.runs[:place], values.coefficients[place], strict=False)
    ]
    return frame_of(rows)


def _setting_frame(values: Record) -> pd.DataFrame:
    first = values.settings[0].name
    with_first = {pair.other: pair for pair in values.pairs if pair.one == first}
    nothing = Record(agreement=Agreement(value=None, low=None, high=None), ceiling=None)
    return frame_of(
        {
            "setting": one.name,
            "changed": ", ".join(one.changed) or "–",
            "runs": len(one.runs),
            "average_percent": one.average,
            "weakest_class": values.classes[one.weakest],
            "weakest_class_percent": one.by_class[one.weakest],
            **interval_columns("agreement_between_seeds", one.within),
            **interval_columns("agreement_with_first", with_first.get(one.name, nothing).agreement),
            "ceiling_with_first": with_first.get(one.name, nothing).ceiling,
        }
        for one in values.settings
    )


def _finding(values: Record) -> str:
    label, times = Counter(one.weakest for one in values.settings).most_common(1)[0]
    sentence = (
        f"{capitalized(condition(values.attack))}, {class_name(values.classes[label])} is the weakest in "
        f"{times} of {len(values.settings)} settings"
    )
    within = [one.within.value for one in values.settings if one.within.value is not None]
    if within:
        sentence += f"; Spearman's coefficient of the class accuracies is {np.mean(within):.2f} between seeds"
    known = [change for change in values.changes if change.agreement.value is not None]
    if not known:
        return f"{sentence}."
    least = min(known, key=lambda change: float(change.agreement.value))
    ceiling = "" if least.ceiling is None else f", with a ceiling of {format_number(least.ceiling)}"
    between = f"Spearman's coefficient is lowest between settings that differ in {least.what}"
    return f"{sentence}; {between}: {least.agreement}{ceiling}."


def _figures(values: Record, finding: str) -> list[Figure]:
    names = [one.name for one in values.settings]
    cells = {frozenset((pair.one, pair.other)): pair.agreement.value for pair in values.pairs}
    cells |= {frozenset((one.name,)): one.within.value for one in values.settings}
    weakness = [
        None if None in column else sum(column) / len(column)
        for column in zip(*(one.by_class for one in values.settings), strict=True)
    ]
    view = shown_classes(weakness)
    alt = f"{len(names)} settings on {values.dataset}. {finding}"
    return [
        heatmap(
            [[cells[frozenset((one, other))] for other in names] for one in names],
            title=f"Agreement on the order of the classes, {values.attack}; on the diagonal, between seeds",
            alt=f"Matrix of Spearman's coefficients. {alt}",
            names=names,
            x="setting",
            y="setting",
            unit="Spearman",
            digits=2,
            span=(min([0.0, *(value for value in cells.values() if value is not None)]), 1.0),
        ),
        heatmap(
            [[one.by_class[label] for label in view] for one in values.settings],
            title=f"Accuracy by class, {values.attack}{shown_suffix(view, values.classes)}",
            alt=f"Matrix of accuracies by setting and class. {alt}",
            names=names,
            columns=[values.classes[label] for label in view],
            x="class",
            y="setting",
            unit="%",
            span=(0, 100),
        ),
    ]
