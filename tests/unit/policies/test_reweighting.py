"""Policies that set loss weights, by hand over three epochs; the worst distribution against a solver."""

# K classes

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Task
from classwise.policies import CSL, POLICIES, ChiSquare, FRLRemargin, FRLReweight
from classwise.policies.chi_square import worst_weights
from each import for_each


def task(num_classes: int) -> Task:
    return Task(classes=("cat", "dog", "bird", "frog")[:num_classes], beta=6.0)


def accuracies(robust: list[float], natural: list[float] | None = None, n: int = 10) -> ClassStats:
    """Statistics with the given accuracies, of n examples a class."""
    made = ClassStats.zeros(len(robust))
    for counts in (made.n, made.n_nat, made.n_adv):
        counts += n
    made.correct_adv += (n * torch.tensor(robust, dtype=torch.float64)).round().long()
    made.correct_nat += (n * torch.tensor(natural or robust, dtype=torch.float64)).round().long()
    return made


def losses(means: list[float], n: list[int]) -> ClassStats:
    """Statistics with the given mean losses."""
    made = ClassStats.zeros(len(means))
    made.n += torch.tensor(n)
    made.loss += torch.tensor(means, dtype=torch.float64) * made.n
    return made


def test_csl_weights_by_hand() -> None:
    """K = 3, gamma = 0.5.

    Epoch 1: a = (0.2, 0.4, 0.6), mean 0.4; (mean − a)/mean = (0.5, 0, −0.5); w = (1.25, 1, 0.75). Epoch 2: a =
    (0.3, 0.1, 0.2), mean 0.2; (−0.5, 0.5, 0); w = (1, 1.25, 0.75). Epoch 3: a = (0, 0, 0.9), mean 0.3; (1, 1, −2);
    w = (1.5, 1.75, −0.25), the last floored at 0.01; their sum is 3.26, so all are multiplied by 3/3.26.
    """
    policy = CSL(gamma=0.5)
    assert torch.equal(policy.start(task(3)).weight_adv, torch.ones(3))
    rows = [[0.2, 0.4, 0.6], [0.3, 0.1, 0.2], [0.0, 0.0, 0.9]]
    expected = [(1.25, 1.0, 0.75), (1.0, 1.25, 0.75), (1.5 * 3 / 3.26, 1.75 * 3 / 3.26, 0.01 * 3 / 3.26)]
    for epoch, (robust, weights) in enumerate(zip(rows, expected, strict=True), 1):
        controls = policy.on_epoch_end(accuracies([0.5] * 3), accuracies(robust), epoch)
        assert controls.weight_nat.tolist() == pytest.approx(weights)
        assert torch.equal(controls.weight_adv, controls.weight_nat)


@pytest.mark.parametrize("critical", ["cat", "0", 0])
def test_csl_raises_the_weight_of_a_critical_class_by_hand(critical: str | int) -> None:
    """K = 3, gamma = 0.5, class 0 is critical.

    Epoch 1: a = (0.2, 0.4, 0.8), best 0.8; (0.8 − 0.2)/0.8 = 0.75; w = (1.375, 1, 1), sum 27/8; times 3 · 8/27 that is
    (11/9, 8/9, 8/9). Epoch 2: a = (0.5, 0.2, 0.5): it is among the best, nothing moves. Epoch 3: a = (0.3, 0.6, 0.1);
    (0.6 − 0.3)/0.6 = 0.5; w = (11/9 + 1/4, 8/9, 8/9) = (53, 32, 32)/36; times 3 · 36/117 that is (53, 32, 32)/39.
    """
    policy = CSL(gamma=0.5, critical=critical)
    policy.start(task(3))
    rows = [[0.2, 0.4, 0.8], [0.5, 0.2, 0.5], [0.3, 0.6, 0.1]]
    expected = [(11 / 9, 8 / 9, 8 / 9), (11 / 9, 8 / 9, 8 / 9), (53 / 39, 32 / 39, 32 / 39)]
    for epoch, (robust, weights) in enumerate(zip(rows, expected, strict=True), 1):
        controls = policy.on_epoch_end(accuracies([0.5] * 3), accuracies(robust), epoch)
        assert controls.weight_nat.tolist() == pytest.approx(weights)


def test_csl_waits_while_no_class_is_robust() -> None:
    for critical in (None, "cat"):
        policy = CSL(gamma=0.5, critical=critical)
        policy.start(task(3))
        controls = policy.on_epoch_end(accuracies([0.5] * 3), accuracies([0.0] * 3), 1)
        assert torch.equal(controls.weight_nat, torch.ones(3))


def test_csl_averages_over_classes_in_training() -> None:
    """Class 1 is not in training, so its accuracy of 0 counts for nothing: the mean of (0.2, 0.6) is 0.4."""
    policy, train = CSL(gamma=0.5), accuracies([0.5] * 3)
    policy.start(task(3))
    train.n[1] = 0
    controls = policy.on_epoch_end(train, accuracies([0.2, 0.0, 0.6]), 1)
    assert controls.weight_nat.tolist() == pytest.approx([1.25, 1.0, 0.75])


def test_csl_refuses_invalid_settings() -> None:
    with pytest.raises(InputError, match="gamma must be positive, got 0"):
        CSL(gamma=0)
    with pytest.raises(InputError, match="unknown class 'cot': did you mean 'cat'"):
        build("policy", POLICIES, "csl:critical=cot").start(task(3))
    with pytest.raises(InputError, match="class 3 does not exist: expected 0 to 2"):
        build("policy", POLICIES, "csl:critical=3").start(task(3))


FRL_EPOCHS = [
    # natural, robust accuracy
    ([0.9, 0.5], [0.6, 0.0]),
    ([0.5, 0.9], [0.1, 0.4]),
    ([0.2, 1.0], [0.0, 0.1]),
    ([1.0, 0.2], [0.1, 0.0]),
]


def frl_course(policy: FRLReweight) -> list[ClassControls]:
    policy.start(task(2))
    train = accuracies([0.5, 0.5])
    return [policy.on_epoch_end(train, accuracies(rob, nat), epoch) for epoch, (nat, rob) in enumerate(FRL_EPOCHS, 1)]


def test_frl_weights_by_hand() -> None:
    """K = 2, delta = 0.05, rate = 0.5, limit = 0.2; K · w = 1 + 2 lam − Σ lam.

    Epoch 1: clean errors (0.1, 0.5), g0 = (−0.25, 0.15), lam0 = (0, 0.075), K · w0 = (0.925, 1.075); boundary errors
    (0.3, 0.5), g1 = (−0.15, 0.05), lam1 = (0, 0.05), K · w1 = (0.95, 1.05). Epoch 2: clean (0.5, 0.1), g0 = (0.15,
    −0.25), lam0 = (0.075, 0), K · w0 = (1.075, 0.925); boundary (0.4, 0.5), g1 = (−0.1, 0), lam1 as before. Epoch 3:
    clean (0.8, 0), g0 = (0.35, −0.45), lam0 = (0.25, 0), over the limit and so (0.2, 0), K · w0 = (1.2, 0.8); boundary
    (0.2, 0.9), g1 = (−0.4, 0.3), lam1 = (0, 0.35), over the limit and so (0, 0.2), K · w1 = (0.8, 1.2).
    """
    seen = frl_course(FRLReweight(delta=0.05, rate=0.5, limit=0.2))
    natural = [(0.925, 1.075), (1.075, 0.925), (1.2, 0.8)]
    adversarial = [(0.95, 1.05), (0.95, 1.05), (0.8, 1.2)]
    for controls, nat, adv in zip(seen, natural, adversarial, strict=False):
        assert controls.weight_nat.tolist() == pytest.approx(nat)
        assert controls.weight_adv.tolist() == pytest.approx(adv)
        assert torch.equal(controls.eps_scale, torch.ones(2))


def test_frl_radius_by_hand() -> None:
    """K = 2, delta = 0.05, rate_eps = 1, max_scale = 2, with the boundary errors of the test above.

    Epoch 1: g1 = (−0.15, 0.05), lam2 = (ln 0.98 / 2, 0.05), radius (0.98, e^0.1). Epoch 2: g1 = (−0.1, 0): as before.
    Epoch 3: g1 = (−0.4, 0.3), exp(2 · 0.35) is above 2: (0.98, 2). Epoch 4: boundary errors (0.9, 0.2), g1 =
    (0.3, −0.4): from the bounds at once, (0.98 e^0.6, 2 e^−0.8 raised to 0.98).
    """
    settings = {"delta": 0.05, "rate": 0.5, "limit": 0.2}
    seen = frl_course(FRLRemargin(rate_eps=1.0, max_scale=2.0, **settings))
    expected = [(0.98, math.exp(0.1)), (0.98, math.exp(0.1)), (0.98, 2.0), (0.98 * math.exp(0.6), 0.98)]
    for controls, plain, radius in zip(seen, frl_course(FRLReweight(**settings)), expected, strict=True):
        assert controls.eps_scale.tolist() == pytest.approx(radius)
        assert torch.equal(controls.weight_nat, plain.weight_nat)
        assert torch.equal(controls.weight_adv, plain.weight_adv)


def test_frl_floors_negative_weights() -> None:
    """Clean errors (1, 0, 0, 0): g0 = (0.75, −0.25, …), lam0 = (7.5, 0, …), limited to 2; K · w = (7, −1, −1, −1)."""
    policy = FRLReweight(delta=0.0, rate=10.0, limit=2.0)
    policy.start(task(4))
    controls = policy.on_epoch_end(accuracies([0.5] * 4), accuracies([0.0] * 4, [0.0, 1.0, 1.0, 1.0]), 1)
    assert controls.weight_nat.tolist() == pytest.approx([4.0, 0.0, 0.0, 0.0])


def test_frl_fine_tunes_and_remargin_has_its_own_delta() -> None:
    assert FRLReweight.fine_tunes
    assert FRLRemargin.fine_tunes
    assert (FRLReweight().delta, FRLRemargin().delta) == (0.1, 0.07)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("frl-rw:delta=-0.1", "delta must not be negative, got -0.1"),
        ("frl-rw:rate=0", "rate must be positive, got 0.0"),
        ("frl-rw:limit=0", "limit must be positive, got 0.0"),
        ("frl-rwrm:rate_eps=0", "rate_eps must be positive, got 0.0"),
        ("frl-rwrm:max_scale=0.5", "max_scale must be at least 1, got 0.5"),
        ("chi-square:rho=-1", "rho must not be negative, got -1.0"),
    ],
)
def test_invalid_settings_are_refused(spec: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        build("policy", POLICIES, spec)


def test_chi_square_weights_by_hand() -> None:
    """K = 4, rho = 5/6.

    Epoch 1: losses (1, 1, 3, 3), mean 2, std 1: 1 ∓ sqrt(5/6). Epoch 2: losses (0, 3, 4, 5): the class of loss 0 has
    no weight; among the others, whose offsets are (−1, 0, 1), the weights are 4/3 + s · offset with mean square
    16/9 · 3/4 + s²/2 = 1 + 5/6, so s = 1: (0, 1/3, 4/3, 7/3), and 0 is indeed below eta = 3 − 1/3. Epoch 3: losses
    (5, 5, 5, 1): all weight to the three that tie, 4/3 each, is within the ball, as (4/3)² · 3/4 − 1 = 1/3.
    """
    policy, root = ChiSquare(rho=5 / 6), math.sqrt(5 / 6)
    policy.start(task(4))
    rows = [[1.0, 1.0, 3.0, 3.0], [0.0, 3.0, 4.0, 5.0], [5.0, 5.0, 5.0, 1.0]]
    expected = [(1 - root, 1 - root, 1 + root, 1 + root), (0, 1 / 3, 4 / 3, 7 / 3), (4 / 3, 4 / 3, 4 / 3, 0)]
    for epoch, (means, weights) in enumerate(zip(rows, expected, strict=True), 1):
        controls = policy.on_epoch_end(losses([1.0] * 4, [50] * 4), losses(means, [10] * 4), epoch)
        assert controls.weight_nat.tolist() == pytest.approx(weights)
        assert torch.equal(controls.weight_adv, controls.weight_nat)


def test_chi_square_weights_class_means_where_classes_differ_in_size() -> None:
    """Losses (1, 3), rho = 1/4: K p = (1/2, 3/2). On classes of 30 and 10 images, times 40/60 and 40/20."""
    controls = ChiSquare(rho=0.25).on_epoch_end(losses([1.0, 1.0], [30, 10]), losses([1.0, 3.0], [10, 10]), 1)
    assert controls.weight_nat.tolist() == pytest.approx([0.5 * 40 / 60, 1.5 * 40 / 20])


def test_classes_that_tie_have_equal_weights() -> None:
    """The mean of three times 0.1 is not 0.1 in floating point; that difference is no reason to prefer a class."""
    assert torch.equal(worst_weights(torch.full((3,), 0.1, dtype=torch.float64), 1.0), torch.ones(3).double())


@for_each("num_classes", [2, 3, 5, 10])
@for_each("rho", [0.0, 0.01, 0.5, 1.0, 3.0, 50.0])
@for_each("seed", [0, 1])
def test_the_worst_distribution_equals_that_of_a_solver(num_classes: int, rho: float, seed: int) -> None:
    loss = np.random.default_rng(seed).exponential(size=num_classes)
    ours = worst_weights(torch.from_numpy(loss), rho).numpy()
    assert ours.min() >= 0
    assert ours.mean() == pytest.approx(1)
    assert ((ours - 1) ** 2).mean() <= rho + 1e-9
    found = minimize(
        lambda p: -(p @ loss),
        np.full(num_classes, 1 / num_classes),
        method="SLSQP",
        bounds=[(0, 1)] * num_classes,
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1},
            {"type": "ineq", "fun": lambda p: rho - ((num_classes * p - 1) ** 2).mean()},
        ],
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert -found.fun == pytest.approx((ours * loss).mean(), abs=1e-6)
    if rho > 0:
        assert num_classes * found.x == pytest.approx(ours, abs=1e-3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-50, 50), min_size=1, max_size=12),
    st.floats(1e-3, 20),
    st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
def test_no_distribution_in_the_ball_is_worse(tenths: list[int], rho: float, other: list[float]) -> None:
    """Compare with random distributions, moved towards the uniform one until they lie in the ball; ties are
    frequent.
    """
    loss = torch.tensor(tenths, dtype=torch.float64) / 10
    ours = worst_weights(loss, rho)
    assert ours.mean().item() == pytest.approx(1)
    assert (ours - 1).square().mean() <= rho + 1e-9
    for i, j in zip(*torch.where(loss[:, None] <= loss), strict=True):
        assert ours[i] <= ours[j] + 1e-9
    rival = torch.tensor(other[: len(loss)], dtype=torch.float64) + 1e-6
    away = rival / rival.mean() - 1
    rival = 1 + away * min(1.0, math.sqrt(rho / max(float(away.square().mean()), 1e-300)))
    assert (rival * loss).mean() <= (ours * loss).mean() + 1e-9
