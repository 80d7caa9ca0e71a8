"""Calibration: the agreement of a model's confidence with its accuracy."""

# N examples

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 15
"""Number of confidence bins of equal width."""


def bin_of(confidence: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bin (N,) of each confidence; a value on an edge belongs to the lower bin."""
    return np.asarray(np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1))


def expected_calibration_error(confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> float:
    """Return the mean distance between confidence and accuracy of the bins, weighted by their number of examples."""
    difference = np.bincount(bin_of(confidence), weights=confidence - right, minlength=BINS)
    return float(np.abs(difference).sum() / len(confidence))
