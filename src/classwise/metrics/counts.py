"""Counts per class from labels and predictions."""

# N examples, K classes

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def confusion_matrix(labels: Ints, predictions: Ints, num_classes: int) -> Ints:
    """Return the confusion matrix (K, K) of counts: rows are true classes, columns predicted ones.

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    flat = np.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes).astype(np.int64)


def correct_by_class(labels: Ints, predictions: Ints, num_classes: int) -> tuple[Ints, Ints]:
    """Return the numbers of correct predictions (K,) and of examples (K,) of each class."""
    correct = np.bincount(labels[labels == predictions], minlength=num_classes)
    return correct.astype(np.int64), np.bincount(labels, minlength=num_classes).astype(np.int64)
