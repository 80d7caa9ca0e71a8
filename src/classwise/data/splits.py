"""Class-balanced splits and subsets."""

# N examples, K classes

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from classwise.core.errors import InputError


def balanced_split(
    labels: ArrayLike, per_class: int, seed: int, num_classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted indices for training and for validation, the latter ``per_class`` random examples of each class.

    Every class with examples must keep at least one for training. The draw for a class depends only on the seed and
    on that class.

    >>> train, validation = balanced_split([0, 0, 0, 1, 1, 1, 1], per_class=2, seed=0, num_classes=2)
    >>> len(train), len(validation)
    (3, 4)
    """
    rows = _rows_by_class(labels, per_class, num_classes)
    chosen = np.zeros(sum(map(len, rows)), dtype=bool)
    for label, own in enumerate(rows):
        if 0 < len(own) <= per_class:
            needed = f"{per_class + 1} or more to hold out {per_class} per class"
            raise InputError(f"class {label} has {len(own)} examples; expected {needed}")
        chosen[draw(own, per_class, seed, label)] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def balanced_subset(labels: ArrayLike, per_class: int, num_classes: int, seed: int | None = None) -> NDArray[np.int64]:
    """Return sorted indices of the first ``per_class`` examples of each class, or of random ones given a seed.

    A class with fewer examples contributes all of them.

    >>> balanced_subset([1, 0, 1, 1, 0], per_class=2, num_classes=3).tolist()
    [0, 1, 2, 4]
    """
    rows = _rows_by_class(labels, per_class, num_classes)
    if seed is not None:
        rows = [draw(own, per_class, seed, label) for label, own in enumerate(rows)]
    return np.sort(np.concatenate([own[:per_class] for own in rows]))


def draw(rows: NDArray[np.int64], count: int, seed: int, label: int) -> NDArray[np.int64]:
    """Return ``count`` random rows of a class; the draw depends only on the seed and the class."""
    if seed < 0:
        raise InputError(f"seed = {seed}; expected 0 or more")
    return np.random.default_rng([seed, label]).permutation(rows)[:count]


def _rows_by_class(labels: ArrayLike, per_class: int, num_classes: int) -> list[NDArray[np.int64]]:
    if per_class < 0:
        raise InputError(f"{per_class} examples per class; expected 0 or more")
    labels = np.asarray(labels)
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise InputError(f"label {labels[wrong][0]} at index {int(wrong.argmax())}; expected 0..{num_classes - 1}")
    return [np.flatnonzero(labels == label) for label in range(num_classes)]
