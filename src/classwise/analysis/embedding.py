"""How the classes lie in the space of features, untouched and attacked (Tian et al. 2021, ICLR submission, Fig. 8).

Features are what the last linear layer is given. Natural and adversarial ones are put into one plane together, by t-SNE
(from the principal components, with a seed) or by principal components alone. Distances in a t-SNE picture mean
little; what is told in numbers is the **silhouette**, taken in the space of features itself: for an image, (b - a) /
max(a, b) with a its mean distance to the other images of its class and b that to the nearest other class; 1 where
classes lie apart, below 0 where an image lies nearer to another class. Its mean is taken for each class, among the
natural images and among the adversarial ones. It has no interval: every image's value depends on all the others.
"""

# N examples, D features, K classes

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from classwise.analysis.model_outputs import Look, linear_head, look, look_attacked
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import in_view
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.analysis.wording import decimal, left_out
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.reporting.figures import COLOURS, SYMBOLS, Figure, Series, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Method = Literal["tsne", "pca"]
MOST_POINTS = 20_000
"""Points of one picture: more take t-SNE too long, and nobody can tell them apart."""


class ClassSilhouette(Part):
    """How far one class lies from the others; null where it has fewer than two images, or there is no other class."""

    label: int
    name: str = Field(alias="class")
    natural: float | None
    adversarial: float | None
    n: int


class Silhouettes(Part):
    """The mean over all images."""

    natural: float | None
    adversarial: float | None


class Points(Part):
    """Images in the plane, natural or adversarial, column by column."""

    images: str
    """``natural``, or the attack."""
    index: list[int]
    label: list[int]
    predicted: list[int]
    x: list[float]
    y: list[float]
    silhouette: list[float | None]


class Embedding(Answer):
    """The features of one model in a plane."""

    kind: ClassVar[str] = "embedding"

    model: str
    dataset: str
    classes: list[str]
    superclasses: dict[str, list[int]]
    attack: str
    method: Method
    perplexity: float | None
    """As it was used; null for principal components."""
    explained: list[float] | None
    """Share of the variance along the two principal components, in percent."""
    features: int
    """D."""
    overall: Silhouettes
    by_superclass: Silhouettes | None
    """The same with superclasses for classes."""
    by_class: list[ClassSilhouette]
    natural: Points
    adversarial: Points

    def sentences(self) -> list[str]:
        found = []
        if self.overall.natural is not None and self.overall.adversarial is not None:
            found.append(
                f"The mean silhouette of the classes in {self.features} features is {self.overall.natural:.2f} "
                f"untouched and {self.overall.adversarial:.2f} under {self.attack}."
            )
        known = [part for part in self.by_class if part.adversarial is not None]
        if known:
            least = min(known, key=lambda part: part.adversarial or 0.0)
            most = max(known, key=lambda part: part.adversarial or 0.0)
            found.append(
                f"Under {self.attack}, {least.name} lies least apart from the others ({least.adversarial:.2f}, "
                f"untouched {least.natural:.2f}), and {most.name} most ({most.adversarial:.2f}, untouched "
                f"{most.natural:.2f})."
            )
        groups = self.by_superclass
        if groups is not None and groups.natural is not None and groups.adversarial is not None:
            found.append(
                f"The mean silhouette of the superclasses is {groups.natural:.2f} untouched and "
                f"{groups.adversarial:.2f} under {self.attack}."
            )
        return found

    def tables(self) -> list[Table]:
        view = in_view([part.adversarial for part in self.by_class])
        return [
            Table(
                title="silhouettes",
                about="Mean silhouette of the images of a class among the natural and among the attacked ones, from "
                "the class that lies least apart under attack.",
                columns=["class", NATURAL, self.attack, "images"],
                rows=[
                    [part.name, decimal(part.natural, 3), decimal(part.adversarial, 3), str(part.n)]
                    for part in sorted(self.by_class, key=lambda part: (part.adversarial is None, part.adversarial))
                    if part.label in view
                ],
                foot=left_out(len(view), len(self.classes)),
            )
        ]

    def figures(self) -> list[Figure]:
        found = [self._picture("class", self.classes, list(range(len(self.classes))))]
        if self.superclasses:
            member = membership(self.superclasses, len(self.classes)).tolist()
            found.append(self._picture("superclass", list(self.superclasses), member))
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "images": one.images,
                "index": index,
                "label": label,
                "class": self.classes[label],
                "predicted": predicted,
                "x": x,
                "y": y,
                "silhouette": silhouette,
            }
            for one in (self.natural, self.adversarial)
            for index, label, predicted, x, y, silhouette in zip(
                one.index, one.label, one.predicted, one.x, one.y, one.silhouette, strict=True
            )
        ]

    def _picture(self, what: str, names: list[str], member: list[int]) -> Figure:
        """``member``: for each class, the number of the name that it is shown under."""
        series = []
        for one, end in ((self.natural, ""), (self.adversarial, "-open")):
            group = np.array(member)[one.label]
            for number in np.unique(group).tolist():
                own = np.flatnonzero(group == number).tolist()
                series.append(
                    Series(
                        name=names[number],
                        x=[one.x[row] for row in own],
                        y=[one.y[row] for row in own],
                        colour=COLOURS[number % len(COLOURS)],
                        symbol=SYMBOLS[number // len(COLOURS) % len(SYMBOLS)] + end,
                    )
                )
        axes = ["first of two dimensions", "second of two dimensions"]
        if self.explained is not None:
            axes = [
                f"{place} principal component, {share:.0f}% of the variance"
                for place, share in zip(("first", "second"), self.explained, strict=True)
            ]
        return points(
            series,
            title=f"Features by {what}: filled marks untouched, open marks under {self.attack}",
            alt=f"Features of {self.model} on {self.dataset} in a plane, by {what}. {' '.join(self.sentences())}",
            x=axes[0],
            y=axes[1],
        )


def embedding(
    run: Subject | str | Path,
    *,
    attack: str = "pgd",
    per_class: int = 50,
    method: Method = "tsne",
    superclasses: Superclasses | Path | None = None,
    seed: int = 0,
    perplexity: float = 30,
    progress: Progress = SILENT,
) -> Embedding:
    """The features of the first ``per_class`` images of each class, untouched and after ``attack``, in a plane.

    ``perplexity``: about how many neighbours a point of t-SNE minds; never more than a third of the points.
    """
    subject = Subject.open(run)
    classes = subject.classes
    if method not in ("tsne", "pca"):
        raise InputError(f"method = {method!r}: expected tsne or pca")
    if not perplexity > 0:
        raise InputError(f"perplexity = {perplexity}: expected a positive number")
    groups = superclasses_of(subject.report.dataset.name, len(classes), superclasses)
    linear_head(subject)
    natural = look(subject, per_class=per_class, progress=progress)
    n = len(natural.label)
    if 2 * n > MOST_POINTS:
        raise InputError(
            f"{per_class} images of each of {len(classes)} classes are {2 * n} points; at most {MOST_POINTS} can be "
            f"shown: give a smaller per_class"
        )
    attacked = look_attacked(subject, attack=attack, per_class=per_class, progress=progress)
    here, there = _features(natural), _features(attacked)
    if n < 2 or here.shape[1] < 2:
        raise InputError(f"{n} images with {here.shape[1]} features cannot be put into a plane: 2 of each are needed")
    together = np.concatenate([here, there])
    if not np.ptp(together, axis=0).any():
        raise InputError(f"the model of {subject.path} gives all images the same features")
    used = min(float(perplexity), (2 * n - 1) / 3) if method == "tsne" else None
    plane, explained = _principal(together) if used is None else (_neighbours(together, used, seed), None)
    here_by_class, there_by_class = (silhouettes(one, natural.label) for one in (here, there))
    member = membership(groups, len(classes))[natural.label] if groups else None
    return Embedding(
        model=subject.name,
        dataset=subject.report.dataset.name,
        classes=classes,
        superclasses=groups,
        attack=attack,
        method=method,
        perplexity=used,
        explained=explained,
        features=here.shape[1],
        overall=Silhouettes(natural=_mean(here_by_class), adversarial=_mean(there_by_class)),
        by_superclass=None
        if member is None
        else Silhouettes(natural=_mean(silhouettes(here, member)), adversarial=_mean(silhouettes(there, member))),
        by_class=[
            ClassSilhouette(
                label=label,
                name=name,
                natural=_mean(here_by_class[own]),
                adversarial=_mean(there_by_class[own]),
                n=int(own.sum()),
            )
            for label, name in enumerate(classes)
            for own in [natural.label == label]
        ],
        natural=_points(NATURAL, natural, plane[:n], here_by_class),
        adversarial=_points(attack, attacked, plane[n:], there_by_class),
    )


def silhouettes(features: Floats, label: NDArray[np.int64]) -> Floats:
    """(N,) the silhouette of each image; NaN for one that is alone in its class, or where there is one class only."""
    from sklearn.metrics import silhouette_samples

    present, inverse, counts = np.unique(label, return_inverse=True, return_counts=True)
    if not 2 <= len(present) < len(label):
        return np.full(len(label), np.nan)
    found = silhouette_samples(features, label)
    return np.where(counts[inverse] > 1, found, np.nan)


def _features(seen: Look) -> Floats:
    assert seen.features is not None, "models without a last linear layer were refused before"
    return seen.features.astype(np.float64)


def _principal(features: Floats) -> tuple[Floats, list[float]]:
    from sklearn.decomposition import PCA

    found = PCA(n_components=2, svd_solver="full")
    return found.fit_transform(features), [round(100 * float(share), 4) for share in found.explained_variance_ratio_]


def _neighbours(features: Floats, perplexity: float, seed: int) -> Floats:
    from sklearn.manifold import TSNE

    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features), np.float64)


def _points(images: str, seen: Look, plane: Floats, silhouette: Floats) -> Points:
    return Points(
        images=images,
        index=seen.index.tolist(),
        label=seen.label.tolist(),
        predicted=seen.predicted.tolist(),
        x=plane[:, 0].round(4).tolist(),
        y=plane[:, 1].round(4).tolist(),
        silhouette=[None if np.isnan(value) else round(float(value), 6) for value in silhouette],
    )


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return round(float(known.mean()), 6) if len(known) else None
