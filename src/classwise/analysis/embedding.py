"""Classes in feature space, without and under attack (Tian et al. 2021, ICLR submission, Fig. 8).

Features are the input of the last linear layer. Natural and adversarial features are embedded together in a plane, by
t-SNE (initialized by principal components) or by principal components. Distances in a t-SNE plot mean little; the
number reported is the **silhouette** in feature space: for an image (b - a) / max(a, b), with a its mean distance to
the other images of its class and b that to the nearest other class; 1 for separate classes, below 0 for an image closer
to another class. Means are over the images of a class, separately for natural and adversarial images. They have no
interval, because the silhouette of each image depends on all others.
"""

# N examples, D features, K classes

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from classwise.analysis.model_outputs import Outputs, attacked_outputs, linear_head, natural_outputs
from classwise.analysis.result import AnalysisResult, Record, format_number
from classwise.analysis.run import Run
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.reporting.figures import SERIES_COLORS, SYMBOLS, Figure, Series, points
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Method = Literal["tsne", "pca"]
MOST_POINTS = 20_000
"""Maximum number of points of a figure, because t-SNE is slow for more."""


def embedding(
    run: Run | str | Path,
    *,
    attack: str = "pgd",
    per_class: int = 50,
    method: Method = "tsne",
    superclasses: Superclasses | Path | None = None,
    seed: int = 0,
    perplexity: float = 30,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Features of the first ``per_class`` images of each class, natural and under ``attack``, in a plane.

    ``perplexity``: effective number of neighbors of t-SNE, at most a third of the points.
    """
    run = Run.open(run)
    classes = run.classes
    if method not in ("tsne", "pca"):
        raise InputError(f"method = {method!r}; expected tsne or pca")
    if not perplexity > 0:
        raise InputError(f"perplexity = {perplexity}; expected a positive number")
    groups = superclasses_of(run.report.dataset.name, len(classes), superclasses)
    linear_head(run)
    natural = natural_outputs(run, per_class=per_class, progress=progress)
    n = len(natural.label)
    if 2 * n > MOST_POINTS:
        raise InputError(f"per_class = {per_class} gives {2 * n} points; at most {MOST_POINTS} can be shown")
    attacked = attacked_outputs(run, attack=attack, per_class=per_class, progress=progress)
    here, there = _features(natural), _features(attacked)
    if n < 2 or here.shape[1] < 2:
        raise InputError(f"{n} images with {here.shape[1]} features cannot be embedded; at least 2 of each are needed")
    together = np.concatenate([here, there])
    if not np.ptp(together, axis=0).any():
        raise InputError(f"the model of {run.path} maps all images to the same features")
    used = min(float(perplexity), (2 * n - 1) / 3) if method == "tsne" else None
    plane, explained = _principal_components(together) if used is None else (_tsne(together, used, seed), None)
    here_by_class, there_by_class = (silhouettes(one, natural.label) for one in (here, there))
    member = membership(groups, len(classes))[natural.label] if groups else None
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=classes,
        superclasses=groups,
        attack=attack,
        method=method,
        perplexity=used,
        explained=explained,
        features=here.shape[1],
        overall=Record(natural=_mean(here_by_class), adversarial=_mean(there_by_class)),
        by_superclass=None
        if member is None
        else Record(natural=_mean(silhouettes(here, member)), adversarial=_mean(silhouettes(there, member))),
        by_class=[
            Record(
                {"label": label, "class": name},
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
    means = [format_number(value) for value in (values.overall.natural, values.overall.adversarial)]
    finding = (
        "The classes have no silhouette, which needs two classes with two images each."
        if values.overall.natural is None
        else f"The mean silhouette of the classes in {here.shape[1]} features is {means[0]} without attack and "
        f"{means[1]} under {attack}."
    )
    return AnalysisResult(
        name="embedding",
        finding=finding,
        values=values,
        frames={"points": _point_frame(values), "classes": _class_frame(values)},
        draw=lambda: _figures(values, finding),
    )


def silhouettes(features: Floats, label: NDArray[np.int64]) -> Floats:
    """Return (N,) silhouettes; NaN for an image that is alone in its class, or if there is only one class."""
    from sklearn.metrics import silhouette_samples

    present, inverse, counts = np.unique(label, return_inverse=True, return_counts=True)
    if not 2 <= len(present) < len(label):
        return np.full(len(label), np.nan)
    found = silhouette_samples(features, label)
    return np.where(counts[inverse] > 1, found, np.nan)


def _features(seen: Outputs) -> Floats:
    assert seen.features is not None, "linear_head has rejected models without a last linear layer"
    return seen.features.astype(np.float64)


def _principal_components(features: Floats) -> tuple[Floats, list[float]]:
    from sklearn.decomposition import PCA

    found = PCA(n_components=2, svd_solver="full")
    return found.fit_transform(features), [round(100 * float(share), 4) for share in found.explained_variance_ratio_]


def _tsne(features: Floats, perplexity: float, seed: int) -> Floats:
    from sklearn.manifold import TSNE

    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features), np.float64)


def _points(images: str, seen: Outputs, plane: Floats, silhouette: Floats) -> Record:
    return Record(
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


def _point_frame(values: Record) -> pd.DataFrame:
    frame = pd.concat([pd.DataFrame(part) for part in (values.natural, values.adversarial)], ignore_index=True)
    frame.insert(2, "class", np.array(values.classes, dtype=object)[frame["label"]])
    return frame.astype({"silhouette": float})


def _class_frame(values: Record) -> pd.DataFrame:
    frame = pd.DataFrame(values.by_class)[["class", "label", "natural", "adversarial", "n"]]
    frame = frame.rename(columns={"natural": "natural_silhouette", "adversarial": "adversarial_silhouette"})
    return frame.astype({"natural_silhouette": float, "adversarial_silhouette": float}).sort_values(
        "adversarial_silhouette", kind="stable"
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    figures = [_figure(values, finding, "class", values.classes, list(range(len(values.classes))))]
    if values.superclasses:
        member = membership(values.superclasses, len(values.classes)).tolist()
        figures.append(_figure(values, finding, "superclass", list(values.superclasses), member))
    return figures


def _figure(values: Record, finding: str, what: str, names: list[str], member: list[int]) -> Figure:
    """Draw the points in the color of their group; ``member`` is the number of each class's group."""
    series = []
    for one, end in ((values.natural, ""), (values.adversarial, "-open")):
        group, x, y = np.array(member)[one.label], np.array(one.x), np.array(one.y)
        for number in np.unique(group).tolist():
            series.append(
                Series(
                    name=names[number],
                    x=x[group == number].tolist(),
                    y=y[group == number].tolist(),
                    color=SERIES_COLORS[number % len(SERIES_COLORS)],
                    symbol=SYMBOLS[number // len(SERIES_COLORS) % len(SYMBOLS)] + end,
                )
            )
    axes = ["first dimension", "second dimension"]
    if values.explained is not None:
        axes = [
            f"{place} principal component, {share:.0f}% of the variance"
            for place, share in zip(("first", "second"), values.explained, strict=True)
        ]
    return points(
        series,
        title=f"Features by {what}: filled marks natural, open marks under {values.attack}",
        alt=f"Features of {values.model} on {values.dataset} in a plane, by {what}. {finding}",
        x=axes[0],
        y=axes[1],
    )
