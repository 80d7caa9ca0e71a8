"""Calibration: how well the confidence of a model predicts its accuracy."""

# N examples

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 15
"""Bins of equal width that confidences are put into."""


def bin_of(confidence: NDArray[np.floating]) -> NDArray[np.int64]:
    """(N,) the bin of each confidence; one that lies on an edge belongs to the lower bin."""
    return np.asarray(np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1))


def expected_calibration_error(confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> float:
    """The distance between confidence and accuracy of each bin, weighted by its share of the examples."""
    apart = np.bincount(bin_of(confidence), weights=confidence - right, minlength=BINS)
    return float(np.abs(apart).sum() / len(confidence))
