"""Which classes form groups, by how often they are taken for one another (Tian et al. 2021, Section 4.2).

The **affinity** of two classes is the mean of two shares under attack: of the one taken for the other, and back.
Spectral clustering cuts the classes into groups so that little of it is cut. To each pair a tenth of the mean affinity
is added first (Amini et al. 2013): classes that are hardly confused with any would otherwise be groups of their own.
Groups are read off the eigenvectors by a pivoted QR factorisation (Damle et al. 2019), which has no random start, so
that the order of the classes does not matter.

How many groups: as many as were asked for, else as there are superclasses, else where the eigenvalues of the normalised
Laplacian leave the largest gap, at least 2 and at most K / 2.

How well the groups fit the superclasses says the **adjusted Rand index**: 1 for the same groups, 0 on average for
labels in random order. Beside it stands the value that 95% of such random orders stay below. How far the groups hang on
the examples says their **stability**: the mean adjusted Rand index between them and groups made of redrawn examples.
Shares of errors that stay in a group are higher than by chance in any case, because the groups were chosen for that.
"""

# K classes

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse.csgraph import laplacian
from scipy.spatial.distance import squareform
from sklearn.cluster import spectral_clustering
from sklearn.metrics import adjusted_rand_score

from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap
from classwise.reporting.part import Part
from classwise.reporting.tables import Table

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EVERYWHERE = 0.1
"""What is added to the affinity of each pair, as a share of the mean affinity."""
SHUFFLES = 500
REDRAWS = 20
TOLD = 8
"""Groups up to which a sentence names their classes."""
MOST_NAMED = 12
"""Classes of a group that are named."""


class Group(Part):
    """Classes that are taken for one another."""

    labels: list[int]
    classes: list[str]
    stays: Estimate
    """How many of the wrong predictions on its classes stay in it, in percent."""
    superclass: str | None
    """The superclass that most of its classes are of."""
    of_superclass: int | None
    """How many of them are."""


class Agreement(Part):
    """How alike groups and superclasses are."""

    value: float
    """The adjusted Rand index."""
    by_chance: float
    """What 95% of random orders of the labels stay below."""


class Groups(Answer):
    """The groups that the classes of one model form."""

    kind: ClassVar[str] = "groups"

    model: str
    dataset: str
    classes: list[str]
    attack: str
    chosen_by: Literal["setting", "superclasses", "eigengap"]
    groups: list[Group]
    absent: list[str]
    """Classes without examples, which are in no group."""
    within: Estimate
    """How many of all wrong predictions stay in their group, in percent."""
    within_by_chance: float
    stability: float | None
    superclasses: dict[str, list[int]]
    agreement: Agreement | None
    order: list[int]
    """The labels so that groups, and classes that are taken for one another, stand together."""
    affinity: list[list[float | None]]
    """(K, K) in percent, by label; null where a class is absent, and on the diagonal."""

    def sentences(self) -> list[str]:
        how = {
            "setting": "as asked",
            "superclasses": "as many as there are superclasses",
            "eigengap": "where the eigenvalues leave the largest gap",
        }[self.chosen_by]
        members = ", ".join(f"{{{_listed(group.classes)}}}" for group in self.groups[: TOLD + 1])
        said = f"Under {self.attack} the classes form {len(self.groups)} groups, {how}"
        found = [f"{said}: {members}." if len(self.groups) <= TOLD else f"{said}."]
        found.append(
            f"{share(self.within, '%')} of the wrong predictions stay in the group of the true class; "
            f"of predictions spread evenly over the other classes {self.within_by_chance:.1f}% would."
        )
        if self.stability is not None:
            found.append(
                f"Groups made of redrawn examples agree with these to {self.stability:.2f} "
                "(adjusted Rand index: 1 the same, 0 by chance)."
            )
        if self.agreement is not None:
            found.append(
                f"With the superclasses they agree to {self.agreement.value:.2f}; "
                f"95% of random orders of the labels stay below {self.agreement.by_chance:.2f}."
            )
        if self.absent:
            found.append(f"Without examples, and in no group: {', '.join(self.absent)}.")
        return found

    def tables(self) -> list[Table]:
        named = ["most are"] if self.agreement else []
        return [
            Table(
                title="groups",
                about="Percent of the wrong predictions on the classes of a group that stay in it [95%].",
                columns=["classes", "number", "stay, %", *named],
                rows=[
                    [_listed(group.classes), str(len(group.labels)), share(group.stays)]
                    + ([f"{group.superclass} ({group.of_superclass})"] if named else [])
                    for group in self.groups
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        borders = np.cumsum([len(group.labels) for group in self.groups]).tolist()
        return [
            heatmap(
                [[self.affinity[i][j] for j in self.order] for i in self.order],
                title=f"How much of two classes is taken for the other, {self.attack}, by group",
                alt=f"Matrix of mutual confusion of {self.model} on {self.dataset}: {self.sentences()[0]}",
                names=[self.classes[label] for label in self.order],
                x="class",
                y="class",
                unit="%",
                digits=1,
                groups=borders if self.absent else borders[:-1],
            )
        ]

    def rows(self) -> list[dict[str, Any]]:
        group_of = {label: number for number, group in enumerate(self.groups) for label in group.labels}
        superclass_of = {label: name for name, labels in self.superclasses.items() for label in labels}
        return [
            {
                "label": label,
                "class": name,
                "group": group_of.get(label),
                "superclass": superclass_of.get(label),
                "position": self.order.index(label),
            }
            for label, name in enumerate(self.classes)
        ]


def groups(
    run: Subject | str | Path,
    *,
    attack: str | None = None,
    number: int | None = None,
    superclasses: Superclasses | Path | None = None,
    seed: NonNegativeInt = 0,
) -> Groups:
    """Group the classes of a model by mutual confusion. ``attack``: one of the report's, else all of them together."""
    subject = Subject.open(run)
    key, classes = subject.key(attack), subject.classes
    named = superclasses_of(subject.report.dataset.name, len(classes), superclasses)
    counts = np.array(subject.report.confusion[key], dtype=np.int64)
    present = np.flatnonzero(counts.sum(1))
    if len(present) < 3:
        raise InputError(f"{subject.path} has examples of fewer than three classes: there is nothing to group")
    affinity = affinity_of(counts)[np.ix_(present, present)]
    if not affinity.any():
        raise InputError(f"{subject.path} has no wrong predictions under {key}: there is nothing to group by")

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
        agreement = Agreement(
            value=round(float(adjusted_rand_score(member_of, group_of)), 4),
            by_chance=round(float(np.quantile(shuffled, 0.95)), 4),
        )

    def group(own: int) -> Group:
        at = np.flatnonzero(group_of == own)
        labels = [int(present[place]) for place in at]
        top = None if member_of is None else int(np.bincount(member_of[at]).argmax())
        return Group(
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
    return Groups(
        model=subject.name,
        dataset=subject.report.dataset.name,
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


def affinity_of(counts: Ints) -> Floats:
    """(K, K) the mean share of two classes that is taken for the other; zero on the diagonal.

    >>> affinity_of(np.array([[8, 2], [6, 14]])).round(3).tolist()
    [[0.0, 0.25], [0.25, 0.0]]
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    np.fill_diagonal(shares, 0)
    return np.asarray((shares + shares.T) / 2, dtype=np.float64)


def spectral_groups(affinity: Floats, number: int, seed: int = 0) -> Ints:
    """(K,) the number of each class's group. The seed only starts the search for eigenvectors."""
    cut = spectral_clustering(
        _everywhere(affinity), n_clusters=number, random_state=seed % 2**32, assign_labels="cluster_qr"
    )
    return np.asarray(cut, dtype=np.int64)


def eigengap(affinity: Floats) -> int:
    """How many groups the eigenvalues of the normalised Laplacian suggest.

    >>> two = np.kron(np.eye(2), np.ones((3, 3)) - np.eye(3))
    >>> eigengap(two)
    2
    """
    values = np.linalg.eigvalsh(laplacian(_everywhere(affinity), normed=True))
    most = max(2, len(affinity) // 2)
    return 2 + int(np.argmax(np.diff(values)[1:most]))


def _everywhere(affinity: Floats) -> Floats:
    """A little affinity between all pairs: the graph is connected then, and no class all alone."""
    k = len(affinity)
    raised: Floats = affinity + EVERYWHERE * affinity.sum() / (k * (k - 1))
    np.fill_diagonal(raised, 0)
    return raised


def _number(
    asked: int | None, affinity: Floats, member_of: Ints | None
) -> tuple[int, Literal["setting", "superclasses", "eigengap"]]:
    k = len(affinity)
    if asked is not None:
        if not 2 <= asked < k:
            raise InputError(f"number = {asked}: {k} classes form 2 to {k - 1} groups")
        return asked, "setting"
    known = 0 if member_of is None else len(np.unique(member_of))
    return (known, "superclasses") if 2 <= known < k else (eigengap(affinity), "eigengap")


def _in_order(cut: Ints, affinity: Floats) -> tuple[Ints, Ints]:
    """Groups numbered, and classes ordered, so that neighbours are taken for one another: as the leaves of a tree.

    The tree is built by average linkage. Its leaves may mix the groups, so that groups come by the mean place of
    their leaves, and classes by place within their group.
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
    """None where redrawn examples hold no error."""
    random = np.random.default_rng(seed)
    n = counts[present].sum(1)
    found = []
    for _ in range(REDRAWS):
        redrawn = np.zeros_like(counts)
        redrawn[present] = random.multinomial(n, counts[present] / n[:, None])
        affinity = affinity_of(redrawn)[np.ix_(present, present)]
        if affinity.any():
            found.append(adjusted_rand_score(group_of, spectral_groups(affinity, number, seed)))
    return round(float(np.mean(found)), 4) if found else None


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
