"""Policies that weight every batch: the solver against scipy and its optimality conditions, and batches by hand."""

# B batch, K classes

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from classwise.core.errors import InputError
from classwise.core.types import LossTerms, reduce
from classwise.policies.faal import FAAL, worst_mixture
from each import for_each


def every(num_classes: int) -> Tensor:
    return torch.ones(num_classes, dtype=torch.bool)


def by_scipy(means: np.ndarray, radius: float) -> np.ndarray:
    """The same problem with a general solver, over the logits z of p = softmax(z), where KL(u ‖ p) = log mean e^(z -
    mean z).
    """

    def softmax(z: np.ndarray) -> np.ndarray:
        powers = np.exp(z - z.max())
        return powers / powers.sum()

    def value(z: np.ndarray) -> tuple[float, np.ndarray]:
        p = softmax(z)
        return -p @ means, -p * (means - p @ means)

    def room(z: np.ndarray) -> float:
        return radius - np.log(np.mean(np.exp(z - z.mean())))

    def room_gradient(z: np.ndarray) -> np.ndarray:
        return 1 / len(z) - softmax(z)

    within = {"type": "ineq", "fun": room, "jac": room_gradient}
    options = {"ftol": 1e-14, "maxiter": 1000}
    found = minimize(value, np.zeros(len(means)), jac=True, method="SLSQP", constraints=[within], options=options)
    return softmax(found.x)


@for_each("num_classes", [2, 10, 100])
@for_each("radius", [0.05, 0.5, 2.0])
@for_each("seed", range(4))
def test_mixture_equals_that_of_scipy(num_classes: int, radius: float, seed: int) -> None:
    means = 3 * np.random.default_rng(seed).normal(size=num_classes)
    p = worst_mixture(torch.tensor(means), every(num_classes), radius).numpy()
    assert p == pytest.approx(by_scipy(means, radius), abs=1e-6)  # the solver's precision; ours is tested below


@pytest.mark.parametrize("radius", [1e-6, 0.05, 0.5, 2.0, 5.0])
@given(means=st.lists(st.integers(-1000, 1000), min_size=2, max_size=100, unique=True))
@settings(deadline=None, max_examples=60)
def test_mixture_meets_the_optimality_conditions(radius: float, means: list[int]) -> None:
    """Primal: Σ p = 1, KL = radius. Stationary: m_k = mu - lambda · u_k / p_k with lambda > 0 and mu > max m."""
    m = np.array(means, dtype=float) / 100
    k = len(m)
    p = worst_mixture(torch.tensor(m), every(k), radius).numpy()
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert np.mean(-np.log(k * p)) == pytest.approx(radius, rel=1e-9, abs=1e-12)
    best, worst = m.argmax(), m.argmin()
    shadow = (m[best] - m[worst]) / (1 / (k * p[worst]) - 1 / (k * p[best]))
    level = m[best] + shadow / (k * p[best])
    assert shadow > 0
    assert level > m[best]
    # The conditions times p: shares as small as e^-400 have no digits to spare.
    assert (level - m) * k * p == pytest.approx(shadow, rel=1e-6)


@given(means=st.lists(st.floats(-50, 50), min_size=2, max_size=20), radius=st.sampled_from([0.05, 0.5, 2.0]))
@settings(deadline=None, max_examples=60)
def test_mixture_prefers_worse_classes_and_stays_within_the_radius(means: list[float], radius: float) -> None:
    given = torch.tensor(means, dtype=torch.float64)
    p = worst_mixture(given, every(len(means)), radius)
    assert p.isfinite().all()
    assert -(len(means) * p).log().mean() <= radius + 1e-9
    rising = p[given.argsort()]
    # Vector units round the same number in different places differently, by a few units in the last digit.
    assert (rising[1:] >= rising[:-1] * (1 - 1e-14)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_classes", [1, 2, 10, 100])
def test_equal_means_give_the_uniform_mixture(dtype: torch.dtype, num_classes: int) -> None:
    p = worst_mixture(torch.full((num_classes,), -3.7, dtype=dtype), every(num_classes), 0.5)
    assert p.dtype == dtype
    assert torch.allclose(p, torch.full_like(p, 1 / num_classes), rtol=1e-6, atol=0)


def test_single_precision_comes_near_double() -> None:
    means = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for radius in (0.05, 0.5, 2.0):
        double, single = (
            worst_mixture(means.to(dtype), every(100), radius) for dtype in (torch.float64, torch.float32)
        )
        assert torch.allclose(single.double(), double, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_most_extreme_mixture_is_finite(dtype: torch.dtype) -> None:
    """All classes but one equal: the one must come down to about e^-200 / 99 for KL = 2."""
    means = torch.zeros(100, dtype=dtype)
    means[7] = -1
    p = worst_mixture(means, every(100), 2.0)
    others = every(100)
    others[7] = False
    assert torch.allclose(p[others], torch.full_like(p[others], 1 / 99))
    if dtype == torch.float64:
        # KL = 2 solved for the one share: the others are at 1/99 to all digits
        assert math.log(p[7]) == pytest.approx(-200 - 99 * math.log(100 / 99) - math.log(100), rel=1e-12)


def test_absent_classes_are_ignored() -> None:
    means = torch.tensor([1.0, 99.0, -1.0, -99.0], dtype=torch.float64)
    p = worst_mixture(means, torch.tensor([True, False, True, False]), 0.5)
    alone = worst_mixture(means[[0, 2]], every(2), 0.5)
    assert p[[0, 2]].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
    assert p[[1, 3]].tolist() == [0, 0]


def terms(logits: list[list[float]]) -> LossTerms:
    made = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    losses = made.sum(1)
    return LossTerms(nat=0 * losses, adv=losses, beta=1.0, logits_adv=made)


def test_faal_weights_by_hand() -> None:
    """Two classes present, so that p = (1 ± s)/2 with KL = -log(1 - s²)/2: a radius of -log(0.64)/2 gives s = 0.6.

    Batch 1, labels (0, 0, 2): margins 3 - 1 = 2 and 0 - 4 = -4, mean -1; then 5 - 2 = 3. Class 2 is the worse one: p is
    (0.2, 0.8) and the weights, twice p, are (0.4, 1.6); class 1 is absent and keeps one. Batch 2, labels (0, 2, 2):
    class 0 at 1 - 0 = 1, class 2 at 0 and -2, mean -1: weights (1.6, 1, 0.4). Batch 3: both at 1, all weights are one.
    """
    policy = FAAL(radius=-math.log(0.64) / 2)
    course: list[tuple[list[list[float]], list[int], tuple[float, float, float]]] = [
        ([[1, 3, 0], [4, 0, 0], [5, 1, 2]], [0, 0, 2], (0.4, 1.0, 1.6)),
        ([[0, 1, 0], [3, 0, 3], [1, 0, 3]], [0, 2, 2], (1.6, 1.0, 0.4)),
        ([[0, 1, 0], [3, 0, 2], [2, 3, 2]], [0, 2, 2], (1.0, 1.0, 1.0)),
    ]
    for logits, labels, expected in course:
        controls = policy.on_batch(terms(logits), torch.tensor(labels))
        assert controls.weight_adv.tolist() == pytest.approx(expected)
        assert torch.equal(controls.weight_nat, controls.weight_adv)
        assert torch.equal(controls.eps_scale, torch.ones(3))
        assert not controls.weight_adv.requires_grad


def test_faal_loss_of_a_balanced_batch_is_the_mixture_of_class_means() -> None:
    random = torch.Generator().manual_seed(0)
    y = torch.arange(12) % 4
    of_batch = LossTerms(
        nat=torch.rand(12, generator=random),
        adv=torch.rand(12, generator=random),
        beta=6.0,
        logits_nat=torch.randn(12, 4, generator=random),
        logits_adv=torch.randn(12, 4, generator=random),
    )
    loss = reduce(of_batch, y, FAAL(radius=0.5).on_batch(of_batch, y))
    margins = [
        np.mean([max(z[j] for j in range(4) if j != k) - z[k] for z in of_batch.logits_adv[y == k].tolist()])
        for k in range(4)
    ]
    p = by_scipy(np.array(margins), 0.5)
    class_means = [(of_batch.nat + 6 * of_batch.adv)[y == k].mean().item() for k in range(4)]
    assert loss.item() == pytest.approx(p @ class_means, abs=1e-5)


def test_faal_does_not_synchronize_with_the_host() -> None:
    """Fake tensors raise an error if a value is read, as in a CUDA graph capture."""
    with FakeTensorMode():
        logits, y = torch.empty(16, 10), torch.empty(16, dtype=torch.int64)
        made = LossTerms(nat=torch.empty(16), adv=torch.empty(16), beta=1.0, logits_adv=logits)
        assert FAAL().on_batch(made, y).weight_adv.shape == (10,)


def test_faal_refuses_invalid_settings() -> None:
    with pytest.raises(InputError, match="radius must be positive, got 0"):
        FAAL(radius=0)
    clean = LossTerms(nat=torch.zeros(2), adv=torch.zeros(2), beta=0.0, logits_nat=torch.zeros(2, 3))
    with pytest.raises(InputError, match="faal needs adversarial images"):
        FAAL().on_batch(clean, torch.tensor([0, 1]))
