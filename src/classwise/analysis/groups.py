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

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import NonNegativeInt
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse.csgraph import laplacian
from scipy.spatial.distance import squareform
from sklearn.cluster import spectral_clustering
from sklearn.metrics import adjusted_rand_score

from classwise.analysis.confusion import misclassified, symmetrized
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run, capitalized, condition
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import heatmap, off_diagonal

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
    key, classes, dataset = run.key(attack), run.classes, run.report.dataset.name
    named = superclasses_of(dataset, len(classes), superclasses)
    counts = np.array(run.report.confusion[key], dtype=np.int64)
    n = counts.sum(1)
    present = np.flatnonzero(n)
    if len(present) < 3:
        raise InputError(f"{run.path} has examples of {len(present)} classes; groups need at least 3")
    affinity = affinity_of(counts)
    if not affinity.any():
        raise InputError(f"{run.path} has no wrong predictions {condition(key)}; groups need some")

    member_of = membership(named, len(classes))[present] if named else None
    found, chosen_by = _number(number, affinity, member_of)
    group_of, order = _in_order(spectral_groups(affinity, found, seed), affinity)
    wrong = misclassified(counts)[np.ix_(present, present)]
    same = group_of[:, None] == group_of
    inside, errors = (wrong * same).sum(1), wrong.sum(1)
    within = Estimate(**estimate(int(inside.sum()), int(errors.sum())))
    chance = round(float(100 * (errors * (same.sum(1) - 1)).sum() / (len(present) - 1) / errors.sum()), 4)
    summary = {
        **interval_columns("errors_within_percent", within),
        "by_chance_percent": chance,
        "stability": _stability(counts, group_of, found, seed),
        **({} if member_of is None else _agreement(group_of, member_of, seed)),
    }
    rows = []
    for group in range(found):
        own = group_of == group
        stays = Estimate(**estimate(int(inside[own].sum()), int(errors[own].sum())))
        names = [classes[label] for label in present[own]]
        row = {"classes": _listed(names), "number": len(names), **interval_columns("errors_within_percent", stays)}
        if member_of is not None:
            of_superclass = np.bincount(member_of[own])
            row["main_superclass"] = list(named)[of_superclass.argmax()]
            row["classes_of_main_superclass"] = int(of_superclass.max())
        rows.append(row)

    shown = [*present[order], *np.flatnonzero(n == 0)]
    frame = pd.DataFrame({"class": classes, "label": range(len(classes))})
    frame["group"] = pd.Series(group_of, present, dtype="Int64")
    superclass_of = {label: name for name, labels in named.items() for label in labels}
    frame["superclass"] = pd.Series(superclass_of, dtype="str")
    frame = frame.loc[shown].reset_index(drop=True)
    frame["position"] = range(len(classes))
    finding = (
        f"{capitalized(condition(key))}, {share(within, '%')} of the wrong predictions stay within {found} "
        f"groups of classes ({chance:.1f}% if spread evenly over the other classes)."
    )
    borders = np.cumsum(np.bincount(group_of)).tolist()
    figure = heatmap(
        off_diagonal((100 * symmetrized(counts)).round(4)[np.ix_(shown, shown)]),
        title=f"Mutual confusion {condition(key)}, by group",
        alt=f"Matrix of the mean share of two classes that is predicted as the other: {run.name} on {dataset}. "
        f"{finding}",
        names=frame["class"].tolist(),
        x="class",
        y="class",
        unit="%",
        digits=1,
        groups=borders if len(present) < len(classes) else borders[:-1],
    )
    about = {"model": run.name, "dataset": dataset, "classes": classes, "superclasses": named, "attack": key}
    return AnalysisResult(
        name="groups",
        finding=finding,
        about={**about, "number_chosen_by": chosen_by, "seed": seed},
        frames={"classes": frame, "groups": frame_of(rows), "summary": frame_of([summary])},
        draw=lambda: [figure],
    )


def affinity_of(counts: Ints) -> Floats:
    """Return the symmetrized matrix of the classes with examples, with a diagonal of zeros.

    >>> affinity_of(np.array([[8, 2], [6, 14]])).round(3).tolist()
    [[0.0, 0.25], [0.25, 0.0]]
    """
    present = counts.sum(1) > 0
    affinity = symmetrized(counts)[np.ix_(present, present)]
    np.fill_diagonal(affinity, 0)
    return affinity


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


def _number(number: int | None, affinity: Floats, member_of: Ints | None) -> tuple[int, str]:
    """Return the number of groups and what it was chosen by."""
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


def _stability(counts: Ints, group_of: Ints, number: int, seed: int) -> float | None:
    """Return the mean agreement with the groups of resampled examples; None if these contain no error."""
    random = np.random.default_rng(seed)
    n = counts.sum(1)
    found = []
    for _ in range(RESAMPLES):
        affinity = affinity_of(random.multinomial(n, counts / np.maximum(n, 1)[:, None]))
        if affinity.any():
            found.append(adjusted_rand_score(group_of, spectral_groups(affinity, number, seed)))
    return round(float(np.mean(found)), 4) if found else None


def _agreement(group_of: Ints, member_of: Ints, seed: int) -> dict[str, float]:
    random = np.random.default_rng(seed)
    shuffled = [adjusted_rand_score(member_of, random.permutation(group_of)) for _ in range(SHUFFLES)]
    return {
        "agreement_with_superclasses": round(float(adjusted_rand_score(member_of, group_of)), 4),
        "agreement_by_chance": round(float(np.quantile(shuffled, 0.95)), 4),
    }


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
