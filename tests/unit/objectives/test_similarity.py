"""The similarity of class logits by hand and at zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_similarity

from classwise.objectives.similarity import similarity


def test_by_hand() -> None:
    """Class 0 has the mean (1, 0, 0), class 1 (1, 1, 0), class 2 is absent: the one cosine is 1/√2. Alone, 0."""
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=torch.float64)
    assert similarity(logits, torch.tensor([0, 0, 1])).item() == pytest.approx(2**-0.5)
    assert similarity(logits, torch.tensor([2, 2, 2])).item() == 0.0


@given(st.integers(2, 12), st.integers(1, 30), st.integers(0, 1000))
def test_it_is_the_mean_of_the_cosines_off_the_diagonal(num_classes: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, num_classes, generator=random, dtype=torch.float64)
    y = torch.randint(num_classes, (size,), generator=random)
    found = similarity(logits, y).item()
    means = torch.stack([logits[y == label].mean(0) for label in y.unique()]).numpy()
    cosines, present = cosine_similarity(means), len(means)
    expected = (cosines.sum() - present) / (present * (present - 1)) if present > 1 else 0.0
    assert found == pytest.approx(expected, abs=1e-9)


def test_logits_of_zero_have_a_finite_gradient() -> None:
    """Logits of zero, as of an untrained network whose last layer is zero."""
    logits = torch.zeros(4, 3, requires_grad=True)
    similarity(logits, torch.tensor([0, 1, 1, 2])).backward()
    assert torch.equal(logits.grad, torch.zeros(4, 3))
