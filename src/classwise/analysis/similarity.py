"""Similarity of classes in a model, and its relation to their confusion (Benz et al. 2020, Section 3.2).

The **similarity** of two classes is the cosine between the mean logits of their examples, and likewise between their
mean features, the input of the last layer; both on natural and on attacked images.

The **confusion** of two classes is the mean share of either that is predicted as the other. Spearman's coefficient
between the two is over pairs of classes. Pairs that share a class are not independent, so the p-value is Mantel's
(1967): the share of permutations of the classes of one matrix with a coefficient at least as far from zero.

The paper expects that classes similar to many others are vulnerable, so the mean similarity of a class to the others is
also correlated with its accuracy, over classes (see ``correlation``).
"""

# N examples, K classes, D features

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial.distance import squareform
from scipy.stats import rankdata

from classwise.analysis.confusion import symmetrized
from classwise.analysis.correlation import spearman
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns, p_text
from classwise.analysis.run import Run, condition
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.metrics import confusion_matrix
from classwise.reporting.figures import Figure, Series, heatmap, off_diagonal, points
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
ORDERS = 999
"""Number of permutations in Mantel's test."""
MOST_POINTS = 5000
"""Maximum number of pairs that are drawn as points."""


def similarity(
    run: Run | str | Path,
    *,
    attack: str | None = None,
    per_class: int | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Similarity of classes to a model. ``attack``: one of the report, by default the worst case over all.

    Attacked images are generated again by that attack, for the worst case by the attack with the lowest accuracy.
    ``per_class``: number of images per class, by default all evaluated ones.
    """
    run = Run.open(run)
    key = run.key(attack)
    run.require_classes(2)
    natural = natural_outputs(run, per_class=per_class, progress=progress)
    adversarial = attacked_outputs(run, attack=_attack_spec(run, key), per_class=per_class, progress=progress)
    classes, verdicts = run.classes, run.verdicts
    matrices, pairs, correlations = [], [], []
    for name, images in ((key, adversarial), (NATURAL, natural)):
        confused = symmetrized(confusion_matrix(verdicts.label, verdicts.predictions(name), len(classes)))
        accuracies = [part.value for part in run.report[name].by_class]
        for what, vectors in (("logits", images.logits), ("features", images.features)):
            if vectors is None:
                continue
            matrix = cosines(vectors, images.label, len(classes))
            others = pd.DataFrame(np.where(np.eye(len(classes), dtype=bool), np.nan, matrix))
            mean = [None if np.isnan(value) else value for value in others.mean(axis=1).round(6)]
            test, with_accuracy = mantel(matrix, confused, seed), spearman(mean, accuracies, seed)
            row = {"images": name, "similarity_of": what}
            matrices.append((name, what, matrix.round(6)))
            pairs.append(_pair_frame(matrix.round(6), (100 * confused).round(6), row, classes))
            correlations.append(
                {
                    **row,
                    "spearman_with_confusion": test.value,
                    "mantel_p_value": test.p,
                    "pairs": test.pairs,
                    **interval_columns("spearman_with_accuracy", with_accuracy),
                    "p_value": with_accuracy.p_value,
                }
            )
    frames = {"pairs": pd.concat(pairs, ignore_index=True), "correlations": frame_of(correlations)}
    finding = f"{run.name} {condition(key)}: {_finding(frames)}"
    about = {"model": run.name, "dataset": run.report.dataset.name, "classes": classes, "attack": key}
    return AnalysisResult(
        name="similarity",
        finding=finding,
        about={**about, "n": len(natural.label), "seed": seed},
        frames=frames,
        draw=lambda: [*_matrix_figures(run, matrices, finding), *_pair_figures(run.name, frames)],
    )


def cosines(vectors: NDArray[np.floating], label: NDArray[np.int64], num_classes: int) -> Floats:
    """Return (K, K) cosines between the mean vectors of the classes, of (N, D); NaN without examples or direction."""
    member = np.eye(num_classes)[label]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (member.T @ vectors.astype(np.float64)) / member.sum(0)[:, None]
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
    found = np.clip(directions @ directions.T, -1, 1)
    np.fill_diagonal(found, np.where(np.isnan(np.diag(found)), np.nan, 1.0))
    return np.asarray(found)


class Mantel(NamedTuple):
    """Spearman's coefficient and its p-value; None with few classes or without variation."""

    value: float | None
    p: float | None
    pairs: int


def mantel(one: Floats, other: Floats, seed: int = 0) -> Mantel:
    """Return Spearman's coefficient between the upper triangles of two symmetric matrices, with Mantel's p-value."""
    present = ~(np.isnan(one) & ~np.eye(len(one), dtype=bool)).all(1) & ~np.isnan(np.diag(other))
    one, other = one[np.ix_(present, present)], other[np.ix_(present, present)]
    k = len(one)
    upper = np.triu_indices(k, 1)
    if len(upper[0]) < 3 or np.isnan(one[upper]).any() or min(np.ptp(one[upper]), np.ptp(other[upper])) == 0:
        return Mantel(None, None, len(upper[0]))

    def ranks(matrix: Floats) -> Floats:
        ranked = rankdata(matrix[upper]) - (len(upper[0]) + 1) / 2
        return np.asarray(squareform(ranked / np.linalg.norm(ranked)))

    first, second = ranks(one), ranks(other)
    value = float((first * second)[upper].sum())
    random = np.random.default_rng(seed)
    far = 1
    for _ in range(ORDERS):
        order = random.permutation(k)
        # The sum over the upper triangle is half the sum over the matrix.
        far += bool(abs(np.vdot(first, second[np.ix_(order, order)])) / 2 >= abs(value) - 1e-9)
    return Mantel(round(value, 4), round(far / (ORDERS + 1), 6), len(upper[0]))


def _attack_spec(run: Run, key: str) -> str:
    """Return the spec of an attack; for the worst case, of the attack with the lowest accuracy."""
    attacks = run.report.attacks
    if key in attacks:
        return attacks[key].spec
    if not attacks:
        raise InputError(f"{run.path} does not record the attack {key}")
    return attacks[min(attacks, key=lambda name: run.report[name].overall.value or 0.0)].spec


def _pair_frame(matrix: Floats, confused: Floats, images: dict[str, str], classes: list[str]) -> pd.DataFrame:
    """Return all pairs of classes, from the most similar; those without a cosine are last."""
    names, upper = np.array(classes, dtype=object), np.triu_indices(len(classes), 1)
    order = np.argsort(-matrix[upper], kind="stable")[: np.count_nonzero(~np.isnan(matrix[upper]))]
    unknown = np.nonzero(np.tril(np.isnan(matrix), -1))
    label, other = (np.concatenate([known[order], rest]) for known, rest in zip(upper, unknown, strict=True))
    return pd.DataFrame(
        {
            "class": names[label],
            "other_class": names[other],
            "label": label,
            "other_label": other,
            **images,
            "cosine": matrix[label, other],
            "confused_percent": confused[label, other],
        }
    )


def _finding(frames: dict[str, pd.DataFrame]) -> str:
    """Return the sentence about the logits of attacked images, which are first in the frames."""
    top, test = frames["pairs"].iloc[0], frames["correlations"].iloc[0]
    parts = []
    if not np.isnan(top["cosine"]):
        names = f"{top['class']} and {top['other_class']}"
        parts.append(f"the most similar classes by mean logits are {names} ({top['cosine']:.2f})")
    if np.isnan(test["spearman_with_confusion"]):
        parts.append("similarity and confusion cannot be correlated (too few classes, or no variation)")
    else:
        parts.append(
            f"similarity and confusion have a Spearman coefficient of {test['spearman_with_confusion']:.2f} over "
            f"{test['pairs']} pairs (Mantel test{p_text(test['mantel_p_value'])})"
        )
    return f"{'; '.join(parts)}."


def _matrix_figures(run: Run, matrices: list[tuple[str, str, Floats]], finding: str) -> list[Figure]:
    return [
        heatmap(
            off_diagonal(matrix.round(3)),
            title=f"Similarity of classes by {what}, {condition(name)}",
            alt=f"Matrix of cosines between the mean {what} of classes of {run.name} on {run.report.dataset.name}, "
            f"{condition(name)}. {finding}",
            names=run.classes,
            x="class",
            y="class",
            unit="cosine",
            digits=2,
            span=_span(matrix),
        )
        for name, what, matrix in matrices
    ]


def _span(matrix: Floats) -> tuple[float, float] | None:
    """Return a color scale that starts just below the smallest cosine, because cosines of features are large."""
    least = min(matrix[~np.isnan(matrix)], default=0.0)
    return (min(float(np.floor(10 * least) / 10), 0.9), 1.0) if least >= 0 else None


def _pair_figures(model: str, frames: dict[str, pd.DataFrame]) -> list[Figure]:
    if frames["correlations"]["pairs"].max() > MOST_POINTS:
        return []
    found = []
    for what, part in frames["pairs"].dropna(subset="cosine").groupby("similarity_of", sort=False):
        series = [
            Series(
                name=name,
                x=list(own["cosine"]),
                y=list(own["confused_percent"]),
                text=list(own["class"] + " – " + own["other_class"]),
            )
            for name, own in part.groupby("images", sort=False)
        ]
        found.append(
            points(
                series[::-1],
                title=f"Confusion by similarity of {what}",
                alt=f"Confusion of each pair of classes of {model} over the cosine of their mean {what}.",
                x=f"cosine between the mean {what} of two classes",
                y="confused with each other, %",
            )
        )
    return found
