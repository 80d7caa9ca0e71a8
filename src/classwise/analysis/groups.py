"""Groups of mutually confused classes by spectral clustering (Tian et al. 2021, Section 4.2).

The **affinity** of two classes is the mean of two shares under attack: of the one predicted as the other, and back. A
tenth of the mean affinity is added to each pair (Amini et al. 2013), or else rarely confused classes would form groups
of their own. Groups are read off the eigenvectors by a pivoted QR factorization (Damle et al. 2019), which has no
random start, so the order of the classes does not matter.

The number of groups is the given one, else the number of superclasses, else where the eigenvalues of the normalized
Laplacian have the largest gap, at least 2 and at most K / 2.

The **agreement** with the superclasses is the adjusted Rand index: 1 for the same groups, 0 on average for permuted
labels; next to it is the 95% quantile of permuted labels. The **stability** is the mean adjusted Rand index between
the groups and those of resampled examples. The share of errors within groups exceeds chance in any case, because the
groups were chosen for it.
"""

# K classes

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import NonNegativeInt
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse.csgraph import laplacian
from scipy.spatial.distance import squareform
from sklearn.cluster import spectral_clustering
from sklearn.metrics import adjusted_rand_score

from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import Run, capitalized, condition
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
REGULARIZATION = 0.1
"""Affinity added to each pair, as a share of the mean affinity."""
SHUFFLES = 500
RESAMPLES = 20
MOST_NAMED = 12
"""Maximum number of classes of a group that are named."""


def groups(
    run: Run | str | Path,
    *,
    attack: str | None = None,
    number: int | None = None,
    superclasses: Superclasses | Path | None = None,
    seed: NonNegativeInt = 0,
) -> AnalysisResult:
    """Group classes by mutual confusion. ``attack``: one of the report, by default the worst case over all."""
    run = Run.open(run)
    key, classes = run.key(attack), run.classes
    named = superclasses_of(run.report.dataset.name, len(classes), superclasses)
    counts = np.array(run.report.confusion[key], dtype=np.int64)
    present = np.flatnonzero(counts.sum(1))
    if len(present) < 3:
        raise InputError(f"{run.path} has examples of {len(present)} classes; groups need at least 3")
    affinity = affinity_of(counts)[np.ix_(present, present)]
    if not affinity.any():
        raise InputError(f"{run.path} has no wrong predictions {condition(key)}; groups need some")

    member_of = membership(named, len(classes))[present] if named else None
    found, chosen_by = _number(number, affinity, member_of)
    random = np.random.default_rng(seed)
    cut = spectral_groups(affinity, found, seed)
    group_of, order = _in_order(cut, affinity)
    wrong = counts[np.ix_(present, present)]
    np.fill_diagonal(wrong, 0)
    same = group_of[:, None] == group_of
    inside = (wrong * same).sum(1)
    chance = (wrong.sum(1) * (same.sum(1) - 1)).sum() / (len(present) - 1) / wrong.sum()
    agreement = None
    if member_of is not None:
        shuffled = [adjusted_rand_score(member_of, random.permutation(group_of)) for _ in range(SHUFFLES)]
        agreement = Record(
            value=round(float(adjusted_rand_score(member_of, group_of)), 4),
            by_chance=round(float(np.quantile(shuffled, 0.95)), 4),
        )

    def group(own: int) -> Record:
        at = np.flatnonzero(group_of == own)
        labels = [int(present[place]) for place in at]
        top = None if member_of is None else int(np.bincount(member_of[at]).argmax())
        return Record(
            labels=labels,
            classes=[classes[label] for label in labels],
            stays=Estimate(**estimate(int(inside[at].sum()), int(wrong[at].sum()))),
            superclass=None if top is None else list(named)[top],
            of_superclass=None if member_of is None else int((member_of[at] == top).sum()),
        )

    absent = [label for label in range(len(classes)) if label not in set(present.tolist())]
    percent = np.full((len(classes), len(classes)), np.nan)
    percent[np.ix_(present, present)] = (100 * affinity).round(4)
    np.fill_diagonal(percent, np.nan)
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=classes,
        attack=key,
        chosen_by=chosen_by,
        groups=[group(own) for own in range(found)],
        absent=[classes[label] for label in absent],
        within=Estimate(**estimate(int(inside.sum()), int(wrong.sum()))),
        within_by_chance=round(100 * float(chance), 4),
        stability=_stability(counts, present, group_of, found, seed),
        superclasses=named,
        agreement=agreement,
        order=[int(present[place]) for place in order] + absent,
        affinity=[[None if np.isnan(value) else value for value in row] for row in percent.tolist()],
    )
    finding = (
        f"{capitalized(condition(key))}, {share(values.within, '%')} of the wrong predictions stay within {found} "
        f"groups of classes ({values.within_by_chance:.1f}% if spread evenly over the other classes)."
    )
    return AnalysisResult(
        name="groups",
        finding=finding,
        values=values,
        frames={"classes": _class_frame(values), "groups": _group_frame(values)},
        draw=lambda: [_figure(values, finding)],
    )


def _class_frame(values: Record) -> pd.DataFrame:
    """Return one row for each class, in the order of the figure."""
    group_of = {label: number for number, group in enumerate(values.groups) for label in group.labels}
    superclass_of = {label: name for name, labels in values.superclasses.items() for label in labels}
    rows = [
        {
            "class": values.classes[label],
            "label": label,
            "group": group_of.get(label),
            "superclass": superclass_of.get(label),
            "position": position,
        }
        for position, label in enumerate(values.order)
    ]
    return frame_of(rows).astype({"group": "Int64", "superclass": "str"})


def _group_frame(values: Record) -> pd.DataFrame:
    frame = frame_of(
        {
            "classes": _listed(group.classes),
            "number": len(group.labels),
            **interval_columns("errors_within_percent", group.stays),
            "main_superclass": group.superclass,
            "classes_of_main_superclass": group.of_superclass,
        }
        for group in values.groups
    )
    return frame if values.superclasses else frame.drop(columns=["main_superclass", "classes_of_main_superclass"])


def _figure(values: Record, finding: str) -> Figure:
    borders = np.cumsum([len(group.labels) for group in values.groups]).tolist()
    return heatmap(
        [[values.affinity[i][j] for j in values.order] for i in values.order],
        title=f"Mutual confusion {condition(values.attack)}, by group",
        alt=f"Matrix of the mean share of two classes that is predicted as the other: {values.model} on "
        f"{values.dataset}. {finding}",
        names=[values.classes[label] for label in values.order],
        x="class",
        y="class",
        unit="%",
        digits=1,
        groups=borders if values.absent else borders[:-1],
    )


def affinity_of(counts: Ints) -> Floats:
    """Return (K, K) the mean share of two classes that is predicted as the other; zero on the diagonal.

    >>> affinity_of(np.array([[8, 2], [6, 14]])).round(3).tolist()
    [[0.0, 0.25], [0.25, 0.0]]
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    np.fill_diagonal(shares, 0)
    return np.asarray((shares + shares.T) / 2, dtype=np.float64)


def spectral_groups(affinity: Floats, number: int, seed: int = 0) -> Ints:
    """Return (K,) the number of each class's group. The seed only initializes the eigenvector solver."""
    cut = spectral_clustering(
        _regularized(affinity), n_clusters=number, random_state=seed % 2**32, assign_labels="cluster_qr"
    )
    return np.asarray(cut, dtype=np.int64)


def eigengap(affinity: Floats) -> int:
    """Return the number of groups at the largest gap between eigenvalues of the normalized Laplacian.

    >>> two = np.kron(np.eye(2), np.ones((3, 3)) - np.eye(3))
    >>> eigengap(two)
    2
    """
    values = np.linalg.eigvalsh(laplacian(_regularized(affinity), normed=True))
    most = max(2, len(affinity) // 2)
    return 2 + int(np.argmax(np.diff(values)[1:most]))


def _regularized(affinity: Floats) -> Floats:
    """Add a little affinity to all pairs, which connects the graph and keeps single classes from forming groups."""
    k = len(affinity)
    raised: Floats = affinity + REGULARIZATION * affinity.sum() / (k * (k - 1))
    np.fill_diagonal(raised, 0)
    return raised


def _number(
    number: int | None, affinity: Floats, member_of: Ints | None
) -> tuple[int, Literal["setting", "superclasses", "eigengap"]]:
    k = len(affinity)
    if number is not None:
        if not 2 <= number < k:
            raise InputError(f"number = {number}; {k} classes can form 2 to {k - 1} groups")
        return number, "setting"
    known = 0 if member_of is None else len(np.unique(member_of))
    return (known, "superclasses") if 2 <= known < k else (eigengap(affinity), "eigengap")


def _in_order(cut: Ints, affinity: Floats) -> tuple[Ints, Ints]:
    """Number the groups and order the classes by the leaves of an average-linkage tree, so that neighbors are confused.

    The leaves may mix the groups, so groups are ordered by their mean leaf and classes by leaf within their group.
    """
    distance = 1 - affinity / affinity.max()
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    place = np.argsort(leaves_list(tree))
    mean = np.bincount(cut, weights=place) / np.bincount(cut)
    rank = np.argsort(np.argsort(mean, kind="stable"))
    group_of = rank[cut]
    return group_of, np.lexsort((place, group_of))


def _stability(counts: Ints, present: Ints, group_of: Ints, number: int, seed: int) -> float | None:
    """Return the mean agreement with the groups of resampled examples; None if these contain no error."""
    random = np.random.default_rng(seed)
    n = counts[present].sum(1)
    found = []
    for _ in range(RESAMPLES):
        resampled = np.zeros_like(counts)
        resampled[present] = random.multinomial(n, counts[present] / n[:, None])
        affinity = affinity_of(resampled)[np.ix_(present, present)]
        if affinity.any():
            found.append(adjusted_rand_score(group_of, spectral_groups(affinity, number, seed)))
    return round(float(np.mean(found)), 4) if found else None


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
