"""Whether the same classes are weak for different architectures, optimizers, schedules and weight decays (Benz et al.
2020).

Runs whose recipes differ only in the seed are one **configuration**. The agreement of two configurations is the mean of
Spearman's coefficient between the class accuracies of a run of one and a run of the other; runs with the same seed
share their data split and are paired only if there are no others. The same mean over pairs of runs within a
configuration is the agreement between seeds. It limits what can be expected between configurations: their **ceiling**
is the geometric mean of the agreements within each (Spearman 1904, attenuation). At the ceiling, the change of
configuration affects the order of the classes no more than a change of seed; without a ceiling a low agreement cannot
be interpreted.

Intervals are percentile bootstraps, 95%: examples are resampled within classes, the same for every run, and runs within
configurations. Classes are not resampled: the result is about these classes. Resampled coefficients are slightly lower
because of added noise; with two or three runs per configuration, the part of the interval that comes from runs is too
narrow.
"""

# N examples, K classes, R runs, S configurations

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from classwise.analysis.bootstrap import Measured
from classwise.analysis.correlation import FEWEST, Floats
from classwise.analysis.plots import shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, format_number, frame_of, interval_columns
from classwise.analysis.retraining import recipe_if_trained
from classwise.analysis.run import Run, capitalized, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.figures import Figure, heatmap
from classwise.reporting.formatting import class_name

RESAMPLES = 1000
SEVERAL = "several keys"
UNKNOWN = "unknown keys"


def universality(*runs: Run | str | Path, attack: str | None = None, seed: int = 0) -> AnalysisResult:
    """Agreement of runs on the order of the classes. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2)
    key, comparison = compare_runs(opened, attack)
    if not comparison.paired:
        raise InputError("the runs were not all evaluated on the same examples; agreement needs that")
    labels, classes, models = opened[0].verdicts.label, comparison.dataset.classes, comparison.models
    order = np.argsort(labels, kind="stable")
    survived = np.stack([run.verdicts.survived(key)[order] for run in opened], 1)  # (N, R)
    present, begin, n = np.unique(labels[order], return_index=True, return_counts=True)
    if len(present) < FEWEST:
        raise InputError(f"the runs have examples of {len(present)} classes; agreement needs at least {FEWEST}")
    recipes = [one.model_dump(exclude={"name"}) if one else None for one in map(recipe_if_trained, opened)]
    member, configurations = _grouped(recipes)  # (R,) and the recipe of each configuration
    pairing = _Pairing(member, [None if recipe is None else recipe["seed"] for recipe in recipes])

    shares = _class_accuracies(survived, begin, n)
    coefficients = _coefficients(shares)
    found = pairing.means(coefficients, np.ones(len(opened)))
    drawn = _resampled(survived, begin, n, pairing, seed)
    places = range(len(configurations))
    agreements = [[_agreement(found[i, j], drawn[:, i, j]) for j in places] for i in places]

    names, ceilings = _configuration_names(models, recipes, member), _ceilings(found)
    own = [member == place for place in places]
    by_class = np.full((len(configurations), len(classes)), np.nan)
    by_class[:, present] = [100 * shares[:, runs].mean(1) for runs in own]
    weakest = np.nanargmin(by_class, axis=1)
    changed = {(i, j): _changed(configurations[i], configurations[j]) for i, j in combinations(places, 2)}
    frames = {
        "runs": frame_of(
            {
                "run": models[i],
                "other_run": models[j],
                "setting": names[member[i]],
                "other_setting": names[member[j]],
                "spearman": _known(coefficients[i, j]),
                **interval_columns("agreement_of_settings", agreements[member[i]][member[j]]),
            }
            for i in range(len(models))
            for j in range(i)
        ),
        "configurations": frame_of(
            {
                "setting": name,
                "changed": ", ".join(changed.get((0, place), [])) or "–",
                "runs": int(own[place].sum()),
                "average_percent": _known(100 * survived[:, own[place]].mean()),
                "weakest_class": classes[weakest[place]],
                "weakest_class_percent": _known(by_class[place, weakest[place]]),
                **interval_columns("agreement_between_seeds", agreements[place][place]),
                **interval_columns("agreement_with_first", agreements[0][place] if place else Measured()),
                "ceiling_with_first": _known(ceilings[0, place]) if place else None,
            }
            for place, name in enumerate(names)
        ),
        "changes": frame_of(_changes(changed, found, drawn)),
    }
    label, times = Counter(weakest.tolist()).most_common(1)[0]
    finding = (
        f"{capitalized(condition(key))}, {class_name(classes[label])} is the weakest in {times} of {len(names)} "
        f"configurations{_agreements(frames['configurations'], frames['changes'])}."
    )
    alt = f"{len(names)} configurations on {comparison.dataset.name}. {finding}"
    return AnalysisResult(
        name="universality",
        finding=finding,
        about={"models": models, "dataset": comparison.dataset.name, "attack": key, "classes": classes, "seed": seed},
        frames=frames,
        draw=lambda: [_matrix(agreements, names, key, alt), _accuracies(by_class, names, classes, key, alt)],
    )


class _Pairing:
    """Selects the pairs of runs to compare for each pair of configurations."""

    def __init__(self, member: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        self.member = member
        self.of = (np.arange(member.max() + 1)[:, None] == member).astype(np.float64)  # (S, R)
        distinct = np.array([[a is None or a != b for b in seeds] for a in seeds])
        distinct &= ~np.eye(len(seeds), dtype=bool)
        none = (self.of @ distinct @ self.of.T == 0) & ~np.eye(len(self.of), dtype=bool)
        self.allowed = distinct | none[np.ix_(member, member)]

    def means(self, coefficients: Floats, times: Floats) -> Floats:
        """Return the mean coefficients (S, S) over pairs of runs, weighted by ``times``; NaN without pairs."""
        counted = self.of * times
        weight = self.allowed & ~np.isnan(coefficients)
        total = counted @ weight @ counted.T
        sums = counted @ np.where(weight, coefficients, 0.0) @ counted.T
        return np.where(total > 0, sums / np.maximum(total, 1), np.nan)

    def drawn(self, random: np.random.Generator) -> Floats:
        """Return (R,) how often each run is drawn when every configuration resamples its runs."""
        times = np.zeros(len(self.member))
        for own in self.of.astype(bool):
            times[own] = random.multinomial(own.sum(), np.full(own.sum(), 1 / own.sum()))
        return times


def _resampled(
    survived: NDArray[np.bool_], begin: NDArray[np.int64], n: NDArray[np.int64], pairing: _Pairing, seed: int
) -> Floats:
    """Return (RESAMPLES, S, S) mean coefficients of resampled examples and runs."""
    random = np.random.default_rng(seed)

    def drawn() -> Floats:
        examples = np.repeat(begin, n) + (random.random(len(survived)) * np.repeat(n, n)).astype(np.int64)
        again = _coefficients(_class_accuracies(survived[examples], begin, n))
        return pairing.means(again, pairing.drawn(random))

    return np.stack([drawn() for _ in range(RESAMPLES)])


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
    """Return (..., S, S) geometric means of the agreements within two configurations; NaN if one is not positive."""
    within = np.diagonal(means, axis1=-2, axis2=-1)
    root = np.sqrt(np.where(within > 0, within, np.nan))
    return np.asarray(root[..., :, None] * root[..., None, :])


def _changes(changed: Mapping[tuple[int, int], list[str]], found: Floats, drawn: Floats) -> Iterator[dict[str, Any]]:
    """Return the mean agreement of all pairs of configurations that differ in the same key."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for pair, keys in changed.items():
        groups.setdefault(keys[0] if len(keys) == 1 else SEVERAL, []).append(pair)
    ceilings, drawn_ceilings = _ceilings(found), _ceilings(drawn)
    for what, pairs in groups.items():
        i, j = np.array(pairs).T
        bounded = ~np.isnan(ceilings[i, j])
        lost = (ceilings - found)[i, j][bounded]
        drawn_lost = (drawn_ceilings - drawn)[:, i, j][:, bounded]
        yield {
            "changed": what,
            "pairs": len(pairs),
            **interval_columns("agreement", _agreement(_mean_known(found[i, j]), _mean_known(drawn[:, i, j]))),
            "ceiling": _known(_mean_known(ceilings[i, j])),
            **interval_columns("ceiling_minus_agreement", _agreement(_mean_known(lost), _mean_known(drawn_lost))),
        }


def _agreement(value: Floats, drawn: Floats) -> Measured:
    """Return a mean with the middle 95% of its resampled values; null if no pair of runs has a coefficient."""
    known = drawn[~np.isnan(drawn)]
    if np.isnan(value) or not len(known):
        return Measured(_known(value))
    return Measured(_known(value), *map(_known, np.quantile(known, [0.025, 0.975])))


def _grouped(recipes: Sequence[dict[str, Any] | None]) -> tuple[NDArray[np.int64], list[dict[str, Any] | None]]:
    """Return (R,) the configuration of each run, and their recipes; a run without a recipe is its own configuration."""
    configurations: list[dict[str, Any] | None] = []
    member = []
    for recipe in recipes:
        configuration = None if recipe is None else {key: value for key, value in recipe.items() if key != "seed"}
        if configuration is None or configuration not in configurations:
            configurations.append(configuration)
        member.append(len(configurations) - 1 if configuration is None else configurations.index(configuration))
    return np.array(member), configurations


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


def _configuration_names(
    runs: Sequence[str], recipes: Sequence[Mapping[str, Any] | None], member: NDArray[np.int64]
) -> list[str]:
    """Return the name of each configuration: its first run, without the seed if the names stay distinct."""
    first = [int(np.argmax(member == place)) for place in range(member.max() + 1)]
    bare = [runs[run].removesuffix(f"-{(recipes[run] or {}).get('seed')}") for run in first]
    return bare if len(set(bare)) == len(bare) else [runs[run] for run in first]


def _mean_known(values: Floats) -> Floats:
    """Return the mean over the last axis, ignoring NaN; NaN if all values are NaN."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(-1)
    return np.asarray(np.where(known.any(-1), total / np.maximum(known.sum(-1), 1), np.nan))


def _known(value: float | Floats) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)


def _agreements(configurations: pd.DataFrame, changes: pd.DataFrame) -> str:
    """Return the part of the finding about agreement."""
    sentence = ""
    within = configurations["agreement_between_seeds"].dropna()
    if len(within):
        sentence += f"; Spearman's coefficient of the class accuracies is {within.mean():.2f} between seeds"
    if changes.empty or changes["agreement"].isna().all():
        return sentence
    least = changes.loc[changes["agreement"].idxmin()]
    interval = "" if pd.isna(least.agreement_low) else f" [{least.agreement_low:.2f}, {least.agreement_high:.2f}]"
    ceiling = "" if pd.isna(least.ceiling) else f", with a ceiling of {format_number(least.ceiling)}"
    between = f"Spearman's coefficient is lowest between configurations that differ in {least.changed}"
    return f"{sentence}; {between}: {least.agreement:.2f}{interval}{ceiling}"


def _matrix(agreements: Sequence[Sequence[Measured]], names: Sequence[str], attack: str, about: str) -> Figure:
    cells = [[one.value for one in row] for row in agreements]
    return heatmap(
        cells,
        title=f"Agreement on the order of the classes, {attack}; on the diagonal, between seeds",
        alt=f"Matrix of Spearman's coefficients. {about}",
        names=names,
        x="configuration",
        y="configuration",
        unit="Spearman",
        digits=2,
        span=(min([0.0, *(value for row in cells for value in row if value is not None)]), 1.0),
    )


def _accuracies(by_class: Floats, names: Sequence[str], classes: Sequence[str], attack: str, about: str) -> Figure:
    view = shown_classes([_known(value) for value in by_class.mean(0)])
    return heatmap(
        [[_known(row[label]) for label in view] for row in by_class],
        title=f"Accuracy by class, {attack}{shown_suffix(view, classes)}",
        alt=f"Matrix of accuracies by configuration and class. {about}",
        names=names,
        columns=[classes[label] for label in view],
        x="class",
        y="configuration",
        unit="%",
        span=(0, 100),
    )
