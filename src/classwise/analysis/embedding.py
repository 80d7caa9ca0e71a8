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
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_samples

from classwise.analysis.model_outputs import attacked_outputs, linear_head, natural_outputs
from classwise.analysis.result import AnalysisResult, format_number
from classwise.analysis.run import Run
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.reporting.figures import SERIES_COLORS, SYMBOLS, Figure, Series, points
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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
    classes, dataset = run.classes, run.report.dataset.name
    if method not in ("tsne", "pca"):
        raise InputError(f"method = {method!r}; expected tsne or pca")
    if not perplexity > 0:
        raise InputError(f"perplexity = {perplexity}; expected a positive number")
    groups = superclasses_of(dataset, len(classes), superclasses)
    linear_head(run)
    natural = natural_outputs(run, per_class=per_class, progress=progress)
    n = len(natural.label)
    if 2 * n > MOST_POINTS:
        raise InputError(f"per_class = {per_class} gives {2 * n} points; at most {MOST_POINTS} can be shown")
    attacked = attacked_outputs(run, attack=attack, per_class=per_class, progress=progress)
    here, there = (np.asarray(seen.features, np.float64) for seen in (natural, attacked))
    if n < 2 or here.shape[1] < 2:
        raise InputError(f"{n} images with {here.shape[1]} features cannot be embedded; at least 2 of each are needed")
    together = np.concatenate([here, there])
    if not np.ptp(together, axis=0).any():
        raise InputError(f"the model of {run.path} maps all images to the same features")
    used = min(float(perplexity), (2 * n - 1) / 3) if method == "tsne" else None
    plane, explained = _embed(together, used, seed)
    label = natural.label
    group_of = {"class": np.arange(len(classes))}
    if groups:
        group_of["superclass"] = membership(groups, len(classes))
    features = {"natural_silhouette": here, "adversarial_silhouette": there}
    found = {
        what: pd.DataFrame({name: silhouettes(each, of[label]) for name, each in features.items()})
        for what, of in group_of.items()
    }
    summary = pd.DataFrame({what: part.mean() for what, part in found.items()}).T.round(6)
    without, under = summary.loc["class"].tolist()
    finding = (
        "The classes have no silhouette, which needs two classes with two images each."
        if np.isnan(without)
        else f"The mean silhouette of the classes in {here.shape[1]} features is {format_number(without)} without "
        f"attack and {format_number(under)} under {attack}."
    )
    by_class = found["class"].groupby(label).mean().reindex(range(len(classes))).round(6)
    by_class = by_class.rename_axis("label").reset_index()
    by_class.insert(0, "class", classes)
    by_class["n"] = np.bincount(label, minlength=len(classes))
    frame = pd.DataFrame(
        {
            "images": np.repeat([NATURAL, attack], n),
            "index": np.tile(natural.index, 2),
            "class": np.tile(np.array(classes, dtype=object)[label], 2),
            "label": np.tile(label, 2),
            "predicted": np.concatenate([natural.predicted, attacked.predicted]),
            "x": plane[:, 0].round(4),
            "y": plane[:, 1].round(4),
            "silhouette": found["class"].to_numpy().T.ravel().round(6),
        }
    )

    axes = ["first dimension", "second dimension"]
    if explained is not None:
        parts = zip(("first", "second"), explained, strict=True)
        axes = [f"{place} principal component, {share:.0f}% of the variance" for place, share in parts]

    def figure(what: str, names: list[str]) -> Figure:
        return points(
            _series(frame, names, group_of[what]),
            title=f"Features by {what}: filled marks natural, open marks under {attack}",
            alt=f"Features of {run.name} on {dataset} in a plane, by {what}. {finding}",
            x=axes[0],
            y=axes[1],
        )

    about = {"model": run.name, "dataset": dataset, "classes": classes, "superclasses": groups, "attack": attack}
    projection = {"method": method, "perplexity": used, "explained_variance_percent": explained}
    return AnalysisResult(
        name="embedding",
        finding=finding,
        about={**about, **projection, "features": here.shape[1], "seed": seed},
        frames={
            "points": frame,
            "classes": by_class.sort_values("adversarial_silhouette", kind="stable"),
            "summary": summary.rename_axis("groups").reset_index(),
        },
        draw=lambda: [figure(what, list(groups) if what == "superclass" else classes) for what in group_of],
    )


def silhouettes(features: Floats, label: Ints) -> Floats:
    """Return (N,) silhouettes; NaN for an image that is alone in its class, or if there is only one class."""
    present, inverse, counts = np.unique(label, return_inverse=True, return_counts=True)
    if not 2 <= len(present) < len(label):
        return np.full(len(label), np.nan)
    found = silhouette_samples(features, label)
    return np.where(counts[inverse] > 1, found, np.nan)


def _embed(features: Floats, perplexity: float | None, seed: int) -> tuple[Floats, list[float] | None]:
    """Return (N, 2) positions by t-SNE, or without a perplexity the principal components and their variance in %."""
    if perplexity is not None:
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed)
        return np.asarray(tsne.fit_transform(features), np.float64), None
    pca = PCA(n_components=2, svd_solver="full")
    return pca.fit_transform(features), (100 * pca.explained_variance_ratio_).round(4).tolist()


def _series(frame: pd.DataFrame, names: list[str], group_of: Ints) -> list[Series]:
    """Return the natural, then the attacked points of each group; ``group_of`` is the number of each class's group."""
    half = len(frame) // 2
    return [
        Series(
            name=names[number],
            x=own["x"].tolist(),
            y=own["y"].tolist(),
            color=SERIES_COLORS[number % len(SERIES_COLORS)],
            symbol=SYMBOLS[number // len(SERIES_COLORS) % len(SYMBOLS)] + end,
        )
        for part, end in ((frame[:half], ""), (frame[half:], "-open"))
        for number, own in part.groupby(group_of[part["label"]])
    ]
