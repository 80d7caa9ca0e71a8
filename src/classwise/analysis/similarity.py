"""How alike the model finds its classes, and whether alike means confused (Benz et al. 2020, Section 3.2).

The **similarity** of two classes is the cosine between the mean logit vectors of their examples, and likewise between
their mean features: what the last layer is given. Both are taken on untouched and on attacked images.

Beside it stands the **confusion** of the two in the verdicts, the mean of two shares: of the one taken for the other,
and back. Spearman's coefficient between the two runs over pairs of classes. Pairs that share a class are not
independent, so its p value is Mantel's (1967): the classes of one matrix are put into random order, and p is the share
of orders that give a coefficient as far from zero; the order at hand is one of them.

The paper expects that classes which resemble many others are vulnerable: the mean similarity of a class to the others
is related to its robustness as well, over classes, as ``correlation`` says.
"""

# N examples, K classes, D features

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from classwise.analysis.correlation import Correlation, spearman
from classwise.analysis.model_outputs import Look, look, look_attacked
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.wording import decimal, told
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.metrics import confusion_matrix
from classwise.reporting.figures import Figure, Series, heatmap, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
ORDERS = 999
"""Random orders of Mantel's test."""
MOST_ALIKE = 10
"""Pairs that are told."""
MOST_POINTS = 5000
"""Pairs up to which each is a point."""


class Mantel(Part):
    """Spearman's coefficient over pairs of classes; null where there are too few, or all have the same value."""

    value: float | None
    p: float | None
    pairs: int


class Similarity(Part):
    """One (K, K) matrix of cosines, and what goes with it."""

    cosines: list[list[float | None]]
    """Null where a class has no examples, or a mean is zero."""
    with_confusion: Mantel
    mean: list[float | None]
    """(K,) of each class to the others."""
    with_robustness: Correlation
    """Of those means with the accuracy of the class, on the same kind of images."""


class Seen(Part):
    """What the model makes of one kind of images."""

    images: str
    """``natural``, or the attack."""
    logits: Similarity
    features: Similarity | None
    """Null where the model has no last linear layer."""
    confusion: list[list[float | None]]
    """(K, K) symmetrised rates of the verdicts, in percent; null where a class has no examples."""


class ClassSimilarity(Answer):
    """The similarity of the classes of one model."""

    kind: ClassVar[str] = "similarity"

    model: str
    dataset: str
    classes: list[str]
    attack: str
    n: int
    """Images that the means are of."""
    natural: Seen
    adversarial: Seen

    def sentences(self) -> list[str]:
        found = []
        for seen in (self.natural, self.adversarial):
            for what, part in _parts(seen):
                if not (top := _alike(part, 1)):
                    continue
                value, i, j = top[0]
                said = (
                    f"{_title(seen)}, by {what}: {self.classes[i]} and {self.classes[j]} are most alike "
                    f"(cosine {value:.2f})"
                )
                if part.with_confusion.value is not None:
                    said += (
                        f"; over {part.with_confusion.pairs} pairs of classes, being alike and being confused "
                        f"correlate with Spearman {_mantel(part.with_confusion)}"
                    )
                found.append(f"{said}.")
        for seen in (self.natural, self.adversarial):
            if seen.logits.with_robustness.value is not None:
                found.append(
                    f"{_title(seen)}, how much a class resembles the others in its logits and its accuracy correlate "
                    f"with Spearman {told(seen.logits.with_robustness)}."
                )
        return found

    def tables(self) -> list[Table]:
        return [
            Table(
                title=f"most alike, {_title(seen).lower()}, by {what}",
                about="Cosine between the means of two classes, and how often they are confused, in percent.",
                columns=["pair", "cosine", "confused"],
                rows=[
                    [f"{self.classes[i]} – {self.classes[j]}", f"{value:.3f}", decimal(seen.confusion[i][j], 1)]
                    for value, i, j in _alike(part, MOST_ALIKE)
                ],
            )
            for seen in (self.adversarial, self.natural)
            for what, part in _parts(seen)
        ]

    def figures(self) -> list[Figure]:
        found = []
        for seen in (self.adversarial, self.natural):
            for what, part in _parts(seen):
                found.append(
                    heatmap(
                        [
                            [None if i == j or value is None else round(value, 3) for j, value in enumerate(row)]
                            for i, row in enumerate(part.cosines)
                        ],
                        title=f"Similarity of classes by {what}, {_title(seen).lower()}",
                        alt=f"Matrix of cosines between the mean {what} of the classes of {self.model} on "
                        f"{self.dataset}, {_title(seen).lower()}.",
                        names=self.classes,
                        x="class",
                        y="class",
                        unit="cosine",
                        digits=2,
                        span=_span(part),
                    )
                )
        many = self.natural.logits.with_confusion.pairs > MOST_POINTS
        for what in () if many else ("logits", "features"):
            series = [
                Series(
                    name=seen.images,
                    x=[value for value, _, _ in pairs],
                    y=[seen.confusion[i][j] for _, i, j in pairs],
                    text=[f"{self.classes[i]} – {self.classes[j]}" for _, i, j in pairs],
                )
                for seen in (self.natural, self.adversarial)
                for name, part in _parts(seen)
                if name == what
                for pairs in [_alike(part)]
            ]
            if series:
                found.append(
                    points(
                        series,
                        title=f"Are classes with like {what} confused?",
                        alt=f"Confusion of each pair of classes of {self.model} over the cosine of their mean {what}.",
                        x=f"cosine between the mean {what} of two classes",
                        y="confused with each other in %",
                    )
                )
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "images": seen.images,
                "by": what,
                "label": i,
                "other": j,
                "cosine": part.cosines[i][j],
                "confused": seen.confusion[i][j],
                "class": self.classes[i],
                "other_class": self.classes[j],
            }
            for seen in (self.natural, self.adversarial)
            for what, part in _parts(seen)
            for i in range(len(self.classes))
            for j in range(i + 1, len(self.classes))
        ]


def similarity(
    run: Subject | str | Path,
    *,
    attack: str | None = None,
    per_class: int | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> ClassSimilarity:
    """How alike classes are to a model. ``attack``: one of the report's, else all of them together.

    The attacked images are made anew by that attack; where all are meant, by the one that left the fewest.
    ``per_class``: the first so many images of each class, else all that were evaluated.
    """
    subject = Subject.open(run)
    classes = subject.classes
    if len(classes) < 2:
        raise InputError(f"{subject.path} has one class: there is nothing to be similar to")
    key = subject.key(attack)
    natural = look(subject, per_class=per_class, progress=progress)
    adversarial = look_attacked(subject, attack=_spec(subject, key), per_class=per_class, progress=progress)
    return ClassSimilarity(
        model=subject.name,
        dataset=subject.report.dataset.name,
        classes=classes,
        attack=key,
        n=len(natural.label),
        natural=_seen(subject, NATURAL, natural, seed),
        adversarial=_seen(subject, key, adversarial, seed),
    )


def cosines(vectors: NDArray[np.floating], label: NDArray[np.int64], num_classes: int) -> Floats:
    """(K, K) cosines between the mean vectors of the classes, of (N, D); NaN where there is no direction."""
    member = np.eye(num_classes)[label]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (member.T @ vectors.astype(np.float64)) / member.sum(0)[:, None]
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
    found = np.clip(directions @ directions.T, -1, 1)
    np.fill_diagonal(found, np.where(np.isnan(np.diag(found)), np.nan, 1.0))
    return np.asarray(found)


def symmetrised(counts: NDArray[np.int64]) -> Floats:
    """(K, K) the mean of two shares, of i taken for j and of j taken for i; NaN with an absent class.

    >>> symmetrised(np.array([[8, 2], [1, 3]]))[0, 1].round(6)
    np.float64(0.225)
    """
    n = counts.sum(1, keepdims=True)
    rates = np.where(n > 0, counts / np.maximum(n, 1), np.nan)
    return np.asarray((rates + rates.T) / 2)


def mantel(one: Floats, other: Floats, seed: int = 0) -> Mantel:
    """Spearman's coefficient between two symmetric matrices off their diagonals, with Mantel's p value."""
    present = ~(np.isnan(one) & ~np.eye(len(one), dtype=bool)).all(1) & ~np.isnan(np.diag(other))
    one, other = one[np.ix_(present, present)], other[np.ix_(present, present)]
    k = len(one)
    upper = np.triu_indices(k, 1)
    if len(upper[0]) < 3 or np.isnan(one[upper]).any() or min(np.ptp(one[upper]), np.ptp(other[upper])) == 0:
        return Mantel(value=None, p=None, pairs=len(upper[0]))

    def ranks(matrix: Floats) -> Floats:
        ranked = rankdata(matrix[upper])
        square = np.zeros((k, k))
        square[upper] = (ranked - ranked.mean()) / np.linalg.norm(ranked - ranked.mean())
        return square + square.T

    first, second = ranks(one), ranks(other)
    value = float((first * second)[upper].sum())
    random = np.random.default_rng(seed)
    far = 1
    for _ in range(ORDERS):
        order = random.permutation(k)
        # Half the sum over the whole matrix is the sum over its upper triangle.
        far += bool(abs(np.vdot(first, second[np.ix_(order, order)])) / 2 >= abs(value) - 1e-9)
    return Mantel(value=round(value, 4), p=round(far / (ORDERS + 1), 6), pairs=len(upper[0]))


def _spec(subject: Subject, key: str) -> str:
    attacks = subject.report.attacks
    if key in attacks:
        return attacks[key].spec
    if not attacks:
        raise InputError(f"{subject.path} does not say which attack {key} is")
    return attacks[min(attacks, key=lambda name: subject.report[name].overall.value or 0.0)].spec


def _seen(subject: Subject, key: str, images: Look, seed: int) -> Seen:
    k, verdicts = subject.num_classes, subject.verdicts
    confused = symmetrised(confusion_matrix(verdicts.label, verdicts.predictions(key), k))
    accuracies = [part.value for part in subject.report[key].by_class]

    def similar(vectors: NDArray[np.float32]) -> Similarity:
        matrix = cosines(vectors, images.label, k)
        others = np.where(np.eye(k, dtype=bool) | np.isnan(matrix), 0.0, matrix).sum(1)
        known = (~np.isnan(matrix)).sum(1) - 1
        mean = [
            round(float(total / count), 6) if count > 0 else None for total, count in zip(others, known, strict=True)
        ]
        return Similarity(
            cosines=_listed(matrix),
            with_confusion=mantel(matrix, confused, seed),
            mean=mean,
            with_robustness=spearman(mean, accuracies, seed),
        )

    return Seen(
        images=key,
        logits=similar(images.logits),
        features=None if images.features is None else similar(images.features),
        confusion=_listed(100 * confused),
    )


def _parts(seen: Seen) -> list[tuple[str, Similarity]]:
    both = [("logits", seen.logits), ("features", seen.features)]
    return [(what, part) for what, part in both if part is not None]


def _alike(part: Similarity, most: int | None = None) -> list[tuple[float, int, int]]:
    """Pairs of classes, from the most alike."""
    matrix = np.array(part.cosines, dtype=np.float64)
    first, second = np.triu_indices(len(matrix), 1)
    values = matrix[first, second]
    order = np.argsort(-values, kind="stable")[: np.count_nonzero(~np.isnan(values))][:most]
    return list(zip(values[order].tolist(), first[order].tolist(), second[order].tolist(), strict=True))


def _span(part: Similarity) -> tuple[float, float] | None:
    """Shades from a tenth below the least alike: features are seldom negative, and all of them much alike."""
    least = min((value for row in part.cosines for value in row if value is not None), default=0.0)
    return (min(float(np.floor(10 * least) / 10), 0.9), 1.0) if least >= 0 else None


def _listed(matrix: Floats) -> list[list[float | None]]:
    listed = matrix.round(6).astype(object)
    listed[np.isnan(matrix)] = None
    return list(listed.tolist())


def _title(seen: Seen) -> str:
    return "Untouched" if seen.images == NATURAL else f"Under {seen.images}"


def _mantel(part: Mantel) -> str:
    return f"{part.value:.2f} (Mantel's p {'< 0.002' if part.p is not None and part.p < 0.002 else f'= {part.p:.3f}'})"
