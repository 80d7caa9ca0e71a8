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

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from classwise.analysis.correlation import spearman
from classwise.analysis.model_outputs import Outputs, attacked_outputs, natural_outputs
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns, p_text
from classwise.analysis.run import Run, condition
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.metrics import confusion_matrix
from classwise.reporting.figures import Figure, Series, heatmap, points
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
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=run.classes,
        attack=key,
        n=len(natural.label),
        natural=_seen(run, NATURAL, natural, seed),
        adversarial=_seen(run, key, adversarial, seed),
    )
    return AnalysisResult(
        name="similarity",
        finding=_finding(values),
        values=values,
        frames={"pairs": _pair_frame(values), "correlations": _correlation_frame(values)},
        draw=lambda: _figures(values),
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


def symmetrized(counts: NDArray[np.int64]) -> Floats:
    """Return (K, K) the mean share of two classes that is predicted as the other; NaN for absent classes.

    >>> symmetrized(np.array([[8, 2], [1, 3]]))[0, 1].round(6)
    np.float64(0.225)
    """
    n = counts.sum(1, keepdims=True)
    rates = np.where(n > 0, counts / np.maximum(n, 1), np.nan)
    return np.asarray((rates + rates.T) / 2)


def mantel(one: Floats, other: Floats, seed: int = 0) -> Record:
    """Return Spearman's coefficient between the upper triangles of two symmetric matrices, with Mantel's p-value."""
    present = ~(np.isnan(one) & ~np.eye(len(one), dtype=bool)).all(1) & ~np.isnan(np.diag(other))
    one, other = one[np.ix_(present, present)], other[np.ix_(present, present)]
    k = len(one)
    upper = np.triu_indices(k, 1)
    if len(upper[0]) < 3 or np.isnan(one[upper]).any() or min(np.ptp(one[upper]), np.ptp(other[upper])) == 0:
        return Record(value=None, p=None, pairs=len(upper[0]))

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
        # The sum over the upper triangle is half the sum over the matrix.
        far += bool(abs(np.vdot(first, second[np.ix_(order, order)])) / 2 >= abs(value) - 1e-9)
    return Record(value=round(value, 4), p=round(far / (ORDERS + 1), 6), pairs=len(upper[0]))


def _attack_spec(run: Run, key: str) -> str:
    """Return the spec of an attack; for the worst case, of the attack with the lowest accuracy."""
    attacks = run.report.attacks
    if key in attacks:
        return attacks[key].spec
    if not attacks:
        raise InputError(f"{run.path} does not record the attack {key}")
    return attacks[min(attacks, key=lambda name: run.report[name].overall.value or 0.0)].spec


def _seen(run: Run, key: str, images: Outputs, seed: int) -> Record:
    k, verdicts = run.num_classes, run.verdicts
    confused = symmetrized(confusion_matrix(verdicts.label, verdicts.predictions(key), k))
    accuracies = [part.value for part in run.report[key].by_class]

    def similar(vectors: NDArray[np.float32]) -> Record:
        matrix = cosines(vectors, images.label, k)
        others = np.where(np.eye(k, dtype=bool) | np.isnan(matrix), 0.0, matrix).sum(1)
        known = (~np.isnan(matrix)).sum(1) - 1
        mean = [
            round(float(total / count), 6) if count > 0 else None for total, count in zip(others, known, strict=True)
        ]
        return Record(
            cosines=_listed(matrix),
            with_confusion=mantel(matrix, confused, seed),
            mean=mean,
            with_robustness=spearman(mean, accuracies, seed),
        )

    return Record(
        images=key,
        logits=similar(images.logits),
        features=None if images.features is None else similar(images.features),
        confusion=_listed(100 * confused),
    )


def _parts(seen: Record) -> list[tuple[str, Record]]:
    return [(what, seen[what]) for what in ("logits", "features") if seen[what] is not None]


def _ranked_pairs(part: Record, most: int | None = None) -> list[tuple[float, int, int]]:
    """Return pairs of classes with their cosine, from the most similar."""
    matrix = np.array(part.cosines, dtype=np.float64)
    first, second = np.triu_indices(len(matrix), 1)
    values = matrix[first, second]
    order = np.argsort(-values, kind="stable")[: np.count_nonzero(~np.isnan(values))][:most]
    return list(zip(values[order].tolist(), first[order].tolist(), second[order].tolist(), strict=True))


def _span(part: Record) -> tuple[float, float] | None:
    """Return a color scale that starts just below the smallest cosine, because cosines of features are large."""
    least = min((value for row in part.cosines for value in row if value is not None), default=0.0)
    return (min(float(np.floor(10 * least) / 10), 0.9), 1.0) if least >= 0 else None


def _listed(matrix: Floats) -> list[list[float | None]]:
    listed = matrix.round(6).astype(object)
    listed[np.isnan(matrix)] = None
    return list(listed.tolist())


def _pair_frame(values: Record) -> pd.DataFrame:
    """Return all pairs of classes, from the most similar by logits under attack."""
    return frame_of(
        {
            "class": values.classes[i],
            "other_class": values.classes[j],
            "label": i,
            "other_label": j,
            "images": seen.images,
            "similarity_of": what,
            "cosine": part.cosines[i][j],
            "confused_percent": seen.confusion[i][j],
        }
        for seen in (values.adversarial, values.natural)
        for what, part in _parts(seen)
        for i, j in [
            *((i, j) for _, i, j in _ranked_pairs(part)),
            *((i, j) for i in range(len(values.classes)) for j in range(i) if part.cosines[i][j] is None),
        ]
    )


def _correlation_frame(values: Record) -> pd.DataFrame:
    return frame_of(
        {
            "images": seen.images,
            "similarity_of": what,
            "spearman_with_confusion": part.with_confusion.value,
            "mantel_p_value": part.with_confusion.p,
            "pairs": part.with_confusion.pairs,
            **interval_columns("spearman_with_accuracy", part.with_robustness),
            "p_value": part.with_robustness.p_value,
        }
        for seen in (values.adversarial, values.natural)
        for what, part in _parts(seen)
    )


def _finding(values: Record) -> str:
    part = values.adversarial.logits
    top = _ranked_pairs(part, 1)
    sentence = f"{values.model} {condition(values.attack)}: "
    if top:
        cosine, i, j = top[0]
        sentence += (
            f"the most similar classes by mean logits are {values.classes[i]} and {values.classes[j]} ({cosine:.2f})"
        )
    if part.with_confusion.value is None:
        return f"{sentence}; similarity and confusion cannot be correlated (too few classes, or no variation)."
    return (
        f"{sentence}; similarity and confusion have a Spearman coefficient of {part.with_confusion.value:.2f} over "
        f"{part.with_confusion.pairs} pairs (Mantel test{p_text(part.with_confusion.p)})."
    )


def _figures(values: Record) -> list[Figure]:
    both = (values.adversarial, values.natural)
    found = [
        heatmap(
            [
                [None if i == j or value is None else round(value, 3) for j, value in enumerate(row)]
                for i, row in enumerate(part.cosines)
            ],
            title=f"Similarity of classes by {what}, {condition(seen.images)}",
            alt=f"Matrix of cosines between the mean {what} of classes of {values.model} on {values.dataset}, "
            f"{condition(seen.images)}. {_finding(values)}",
            names=values.classes,
            x="class",
            y="class",
            unit="cosine",
            digits=2,
            span=_span(part),
        )
        for seen in both
        for what, part in _parts(seen)
    ]
    if values.natural.logits.with_confusion.pairs > MOST_POINTS:
        return found
    for what, _ in _parts(values.natural):
        series = []
        for seen in reversed(both):
            pairs = _ranked_pairs(seen[what])
            series.append(
                Series(
                    name=seen.images,
                    x=[value for value, _, _ in pairs],
                    y=[seen.confusion[i][j] for _, i, j in pairs],
                    text=[f"{values.classes[i]} – {values.classes[j]}" for _, i, j in pairs],
                )
            )
        found.append(
            points(
                series,
                title=f"Confusion by similarity of {what}",
                alt=f"Confusion of each pair of classes of {values.model} over the cosine of their mean {what}.",
                x=f"cosine between the mean {what} of two classes",
                y="confused with each other, %",
            )
        )
    return found
