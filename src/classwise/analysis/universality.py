"""Whether the same classes are weak however a model is made (Benz et al. 2020: architectures, optimizers, schedules and
weight decays).

Runs whose recipes differ in the seed alone are one **setting**. How far two settings agree is the mean of Spearman's
coefficient between the class accuracies of a run of the one and a run of the other; runs of one seed share their split
of the data and are not paired where there are others. The same mean over the pairs of runs within a setting says how
far a seed agrees with the next. That bounds what can be expected between settings: their **ceiling** is the geometric
mean of the agreement within each (Spearman 1904, attenuation). Agreement at the ceiling says that the change of setting
has moved the classes no more than a change of seed; without a ceiling a low agreement says nothing.

Intervals are those of a percentile bootstrap, 95%: examples are drawn anew within their classes, the same ones for
every run, and runs within their settings. Classes are not drawn: the answer is about these. Redrawn coefficients are a
little lower, because noise draws them towards zero; with two or three runs a setting, the part of the interval that
comes from the runs is too narrow.
"""

# N examples, K classes, R runs, S settings

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from classwise.analysis.correlation import FEWEST, Floats
from classwise.analysis.result import Answer
from classwise.analysis.retraining import recipe_if_trained
from classwise.analysis.run import Subject
from classwise.analysis.several import compared, in_view, opened
from classwise.analysis.wording import decimal
from classwise.core.errors import InputError
from classwise.reporting.figures import Figure, heatmap
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

RESAMPLES = 1000
SEVERAL = "several at once"
UNKNOWN = "something unknown"


class Agreement(Part):
    """A mean of coefficients, or a difference of two; null where no pair of runs has one."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        within = "" if self.low is None else f" [{decimal(self.low, 2)}, {decimal(self.high, 2)}]"
        return f"{decimal(self.value, 2)}{within}"


class Setting(Part):
    """Runs that differ in their seed alone."""

    name: str
    changed: list[str]
    """The keys of the recipe in which it differs from the first setting."""
    runs: list[str]
    average: float
    by_class: list[float | None]
    """Mean accuracy over the runs, in percent; null where a class has no examples."""
    weakest: int
    """The label of the class with the lowest of these."""
    within: Agreement
    """Between its runs; null where there is one."""


class Pair(Part):
    """Two settings."""

    one: str
    other: str
    changed: list[str]
    agreement: Agreement
    ceiling: float | None


class Change(Part):
    """All pairs of settings that differ in one thing."""

    what: str
    pairs: int
    agreement: Agreement
    ceiling: float | None
    """The mean over the pairs whose ceiling is known."""
    lost: Agreement
    """Ceiling less agreement, over those pairs."""


class Universality(Answer):
    """How far settings put the classes in one order."""

    kind: ClassVar[str] = "universality"

    dataset: str
    attack: str
    classes: list[str]
    settings: list[Setting]
    pairs: list[Pair]
    changes: list[Change]
    runs: list[str]
    coefficients: list[list[float | None]]
    """(R, R) between runs."""

    def sentences(self) -> list[str]:
        counted = Counter(one.weakest for one in self.settings).most_common()
        label, times = counted[0]
        found = [
            f"{'Untouched' if self.attack == NATURAL else f'Under {self.attack}'}, "
            f"{self.classes[label]} is the weakest class in {times} of "
            f"{len(self.settings)} settings"
            + "".join(f", {self.classes[other]} in {number}" for other, number in counted[1:])
            + "."
        ]
        within = [one.within.value for one in self.settings if one.within.value is not None]
        if within:
            found.append(
                f"Two seeds of one setting agree on the order of the classes to {np.mean(within):.2f} "
                f"(Spearman, from {min(within):.2f} to {max(within):.2f} over {len(within)} settings): "
                "more than that cannot be expected of two settings."
            )
        for change in self.changes:
            if change.agreement.value is None:
                continue
            said = f"Where settings differ in {change.what}, they agree to {change.agreement}"
            if change.lost.value is not None:
                said += f"; {change.lost} is missing to the ceiling of {decimal(change.ceiling, 2)}"
            found.append(f"{said} ({change.pairs} pair{'s' * (change.pairs > 1)}).")
        return found

    def tables(self) -> list[Table]:
        with_first = {pair.other: pair for pair in self.pairs if pair.one == self.settings[0].name}
        chance = 1.96 / np.sqrt(len(self.classes) - 1)
        return [
            Table(
                title=f"settings, {self.attack}",
                about="Accuracy in percent, means over the runs of a setting. Agreement is the mean of Spearman's "
                "coefficient over pairs of runs [95%, bootstrap over examples and runs]; the ceiling is what seeds "
                f"allow. Of classes in random order, one pair of runs in twenty lies beyond ±{chance:.2f}.",
                columns=[
                    *("setting", "changed", "runs", "average", "weakest class"),
                    *("between seeds", "with the first", "ceiling"),
                ],
                rows=[
                    [
                        one.name,
                        ", ".join(one.changed) or "–",
                        str(len(one.runs)),
                        f"{one.average:.1f}",
                        f"{self.classes[one.weakest]} ({decimal(one.by_class[one.weakest], 1)})",
                        str(one.within),
                        str(with_first[one.name].agreement) if one.name in with_first else "–",
                        decimal(with_first[one.name].ceiling, 2) if one.name in with_first else "–",
                    ]
                    for one in self.settings
                ],
            ),
            Table(
                title="what was changed",
                about="Means over all pairs of settings that differ in one thing; lost: ceiling less agreement.",
                columns=["changed", "pairs", "agreement", "ceiling", "lost"],
                rows=[
                    [
                        *(change.what, str(change.pairs)),
                        *(str(change.agreement), decimal(change.ceiling, 2), str(change.lost)),
                    ]
                    for change in self.changes
                ],
            ),
        ]

    def figures(self) -> list[Figure]:
        names = [one.name for one in self.settings]
        values = {frozenset((pair.one, pair.other)): pair.agreement.value for pair in self.pairs}
        values |= {frozenset((one.name,)): one.within.value for one in self.settings}
        view = in_view([_mean([one.by_class[label] for one in self.settings]) for label in range(len(self.classes))])
        some = f", the {len(view)} weakest classes" if len(view) < len(self.classes) else ""
        alt = f"{len(names)} settings on {self.dataset}. {' '.join(self.sentences())}"
        known = [value for value in values.values() if value is not None]
        return [
            heatmap(
                [[values[frozenset((one, other))] for other in names] for one in names],
                title=f"Agreement on the order of the classes, {self.attack}; on the diagonal, between seeds",
                alt=f"Matrix of Spearman's coefficients. {alt}",
                names=names,
                x="setting",
                y="setting",
                unit="Spearman",
                digits=2,
                span=(min([0.0, *known]), 1.0),
            ),
            heatmap(
                [[one.by_class[label] for label in view] for one in self.settings],
                title=f"Accuracy by class, {self.attack}{some}",
                alt=f"Matrix of accuracies by setting and class. {alt}",
                names=names,
                columns=[self.classes[label] for label in view],
                x="class",
                y="setting",
                unit="%",
                span=(0, 100),
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        setting = {run: one.name for one in self.settings for run in one.runs}
        return [
            {"one": one, "other": other, "setting": setting[one], "other_setting": setting[other], "spearman": value}
            for place, one in enumerate(self.runs)
            for other, value in zip(self.runs[:place], self.coefficients[place], strict=False)
        ]


def universality(*runs: Subject | str | Path, attack: str | None = None, seed: int = 0) -> Universality:
    """Ask runs for the order of their classes. ``attack``: one that all have, or natural; else all attacks together."""
    subjects = opened(runs, 2)
    key, comparison = compared(subjects, attack)
    if not comparison.paired:
        raise InputError("the runs were not all evaluated on the same examples, which their agreement needs")
    labels, classes = subjects[0].verdicts.label, comparison.dataset.classes
    order = np.argsort(labels, kind="stable")
    survived = np.stack([subject.verdicts.survived(key)[order] for subject in subjects], 1)  # (N, R)
    present, begin, n = np.unique(labels[order], return_index=True, return_counts=True)
    if len(present) < FEWEST:
        raise InputError(f"an order of {len(present)} classes says nothing: expected {FEWEST} or more")
    recipes = [_recipe(subject) for subject in subjects]
    member, settings = _grouped(recipes)  # (R,) and the recipe of each setting
    pairing = _Pairing(member, [None if recipe is None else recipe["seed"] for recipe in recipes])

    shares = _shares(survived, begin, n)
    coefficients = _coefficients(shares)
    found = pairing.means(coefficients, np.ones(len(subjects)))
    random = np.random.default_rng(seed)
    drawn = np.empty((RESAMPLES, *found.shape))
    for one in drawn:
        examples = np.repeat(begin, n) + (random.random(len(labels)) * np.repeat(n, n)).astype(np.int64)
        again = _coefficients(_shares(survived[examples], begin, n))
        one[:] = pairing.means(again, pairing.drawn(random))

    names = _names(comparison.models, recipes, member)
    by_class: list[list[float | None]] = [[None] * len(classes) for _ in settings]
    means = np.stack([shares[:, member == place].mean(1) for place in range(len(settings))])
    for place, row in enumerate(means):
        for label, value in zip(present, row, strict=True):
            by_class[place][label] = round(100 * float(value), 4)
    between = [(i, j) for i in range(len(settings)) for j in range(i + 1, len(settings))]
    changed = {(i, j): _changed(settings[i], settings[j]) for i, j in between}
    ceilings = _ceilings(found)
    return Universality(
        dataset=comparison.dataset.name,
        attack=key,
        classes=classes,
        settings=[
            Setting(
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
            Pair(
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


class _Pairing:
    """Which runs make a pair, setting by setting."""

    def __init__(self, member: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        self.member = member
        self.of = (np.arange(member.max() + 1)[:, None] == member).astype(np.float64)  # (S, R)
        apart = np.array([[a is None or a != b for b in seeds] for a in seeds])
        apart &= ~np.eye(len(seeds), dtype=bool)
        none = (self.of @ apart @ self.of.T == 0) & ~np.eye(len(self.of), dtype=bool)
        self.allowed = apart | none[np.ix_(member, member)]

    def means(self, coefficients: Floats, times: Floats) -> Floats:
        """(S, S) mean coefficient of the pairs, with each run counted so many times; NaN where there is none."""
        counted = self.of * times
        weight = self.allowed & ~np.isnan(coefficients)
        total = counted @ weight @ counted.T
        sums = counted @ np.where(weight, coefficients, 0.0) @ counted.T
        return np.where(total > 0, sums / np.maximum(total, 1), np.nan)

    def drawn(self, random: np.random.Generator) -> Floats:
        """(R,) how often each run comes up when every setting draws as many of its own as it has."""
        times = np.zeros(len(self.member))
        for own in self.of.astype(bool):
            times[own] = random.multinomial(own.sum(), np.full(own.sum(), 1 / own.sum()))
        return times


def _shares(survived: NDArray[np.bool_], begin: NDArray[np.int64], n: NDArray[np.int64]) -> Floats:
    """(K, R) share of each class that survived, of examples sorted by class."""
    return np.asarray(np.add.reduceat(survived, begin, 0, dtype=np.int64) / n[:, None])


def _coefficients(shares: Floats) -> Floats:
    """(R, R) Spearman's, NaN where all classes of a run are equal."""
    ranks = rankdata(shares, axis=0)
    ranks -= ranks.mean(0)
    length = np.linalg.norm(ranks, axis=0)
    ranks = np.divide(ranks, length, out=np.full_like(ranks, np.nan), where=length > 0)
    return np.asarray(np.clip(ranks.T @ ranks, -1, 1))


def _ceilings(means: Floats) -> Floats:
    """(..., S, S) geometric mean of the agreement within either setting; NaN where one has none, or none above 0."""
    within = np.diagonal(means, axis1=-2, axis2=-1)
    root = np.sqrt(np.where(within > 0, within, np.nan))
    return np.asarray(root[..., :, None] * root[..., None, :])


def _changes(changed: Mapping[tuple[int, int], list[str]], found: Floats, drawn: Floats) -> list[Change]:
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
            Change(
                what=what,
                pairs=len(pairs),
                agreement=_agreement(_nanmean(found[i, j]), _nanmean(drawn[:, i, j])),
                ceiling=_known(_nanmean(ceilings[i, j])),
                lost=_agreement(_nanmean(lost), _nanmean(drawn_lost)),
            )
        )
    return changes


def _agreement(value: Floats, drawn: Floats) -> Agreement:
    """With the interval that holds the middle 95% of the draws."""
    known = drawn[~np.isnan(drawn)]
    if np.isnan(value) or not len(known):
        return Agreement(value=_known(value), low=None, high=None)
    low, high = np.quantile(known, [0.025, 0.975])
    return Agreement(value=_known(value), low=_known(low), high=_known(high))


def _recipe(subject: Subject) -> dict[str, Any] | None:
    recipe = recipe_if_trained(subject)
    return None if recipe is None else recipe.model_dump(exclude={"name"})


def _grouped(recipes: Sequence[dict[str, Any] | None]) -> tuple[NDArray[np.int64], list[dict[str, Any] | None]]:
    """(R,) the setting of each run, and their recipes; a run that was not trained here is a setting of its own."""
    settings: list[dict[str, Any] | None] = []
    member = []
    for recipe in recipes:
        setting = None if recipe is None else {key: value for key, value in recipe.items() if key != "seed"}
        if setting is None or setting not in settings:
            settings.append(setting)
        member.append(len(settings) - 1 if setting is None else settings.index(setting))
    return np.array(member), settings


def _changed(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """Keys in which two recipes differ: of a table under one name, the keys inside."""
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


def _names(runs: Sequence[str], recipes: Sequence[Mapping[str, Any] | None], member: NDArray[np.int64]) -> list[str]:
    """What settings are called: as their first run, without the seed where that leaves all names apart."""
    first = [int(np.argmax(member == place)) for place in range(member.max() + 1)]
    bare = [runs[run].removesuffix(f"-{(recipes[run] or {}).get('seed')}") for run in first]
    return bare if len(set(bare)) == len(bare) else [runs[run] for run in first]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _nanmean(values: Floats) -> Floats:
    """Over the last axis; NaN where nothing is known."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(-1)
    return np.asarray(np.where(known.any(-1), total / np.maximum(known.sum(-1), 1), np.nan))


def _known(value: float | Floats) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)
