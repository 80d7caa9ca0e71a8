"""The real data sets, where a mirror of them is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from classwise.data import load_data

MIRROR = Path(os.environ.get("CLASSWISE_DATA") or Path(__file__).parents[4] / "shared" / "data")

EXPECTED = [
    ("cifar10", "uoft-cs/cifar10", (10000, 3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1], [1000] * 10, 121.5),
    (
        "mnist",
        "ylecun/mnist",
        (10000, 1, 28, 28),
        [7, 2, 1, 0, 4, 1, 4, 9, 5, 9],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        33.8,
    ),
]


@pytest.mark.parametrize(("name", "hub", "shape", "labels", "counts", "mean"), EXPECTED, ids=["cifar10", "mnist"])
def test_real_test_split(name, hub, shape, labels, counts, mean, monkeypatch):
    if not (MIRROR / hub).is_dir():
        pytest.skip(f"no mirror of {hub}: set CLASSWISE_DATA")
    monkeypatch.setenv("CLASSWISE_DATA", str(MIRROR))
    found = load_data(name)
    assert found.images.shape == shape
    assert found.labels[:10].tolist() == labels
    assert found.counts(10).tolist() == counts
    assert abs(np.asarray(found.images).mean() - mean) < 0.1
