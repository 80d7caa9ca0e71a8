"""Both bounds on small cases by hand, and on a run."""

# N examples, K classes, T rounds

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import classwise as cw
from classwise.analysis import bound
from classwise.analysis.bound import linear_bound, no_regret, robust_margins
from classwise.core.errors import InputError


def test_theorem_1_by_hand() -> None:
    """Two classes and their average, two rounds, eta = 1/2.

    Round 1: weights 1/3, so (0.2 + 0.8 + 0.5) / 3 = 0.5. Round 2: weights in proportion to e^0.1, e^0.4, e^0.25.
    """
    found = no_regret([[0.2, 0.8, 0.5], [0.4, 0.6, 0.5]], eta=0.5)
    raw = [math.exp(0.1), math.exp(0.4), math.exp(0.25)]
    second = (0.4 * raw[0] + 0.6 * raw[1] + 0.5 * raw[2]) / sum(raw)
    assert found.worst_class_loss == 0.6
    assert found.weighted_loss == pytest.approx((0.5 + second) / 2)
    assert found.regret == pytest.approx(math.log(3) / (0.5 * 2))
    assert found.bound == pytest.approx((0.5 + second) / 2 + math.log(3))
    assert found.bound_by_round[0] == pytest.approx(0.5 + 2 * math.log(3))
    assert found.loss_by_round == [0.8, 0.6]
    assert found.holds
    assert found.eta_small_enough  # 0.5 · 0.8 = 0.4
    # the mean of class 0 is 0.3, and 0.2 / (1 - 0.4) = 0.33 is more
    assert not found.losses_high_enough


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 30), st.floats(0.01, 5.0))
def test_theorem_1_holds_where_its_assumptions_do(seed: int, k: int, rounds: int, scale: float) -> None:
    """The theorem holds for any losses; B is their scale."""
    random = np.random.default_rng(seed)
    by_class = scale * random.uniform(0, 1, (rounds, k))
    found = no_regret(np.column_stack([by_class, by_class.mean(1)]), eta=0.5 / scale)
    if found.eta_small_enough and found.losses_high_enough:
        assert found.holds
    assert found.bound == pytest.approx(found.bound_by_round[-1])


def test_theorem_3_by_hand() -> None:
    """K = 2, one example a class, so the signs do not matter: U = max ‖x‖_inf = 2. W = 3 (p = 1), d = 2."""
    weights, x, y = [[1.0, -2.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]], [0, 1]
    # margins: 2 - 0 - 0.1 · 4 = 1.6 and 1 - (-2) - 0.4 = 2.6
    assert robust_margins(np.array(weights), np.array(x), np.array(y), 0.1).tolist() == pytest.approx([1.6, 2.6])
    found = linear_bound(weights, x, y, eps=0.1, gamma=2.0, delta=0.1, draws=3)
    assert found.norm == 3.0
    assert found.margin_errors == 2 * 0.5
    assert found.complexity == pytest.approx(2 * 3 * 8 * 2 / (2 * 2))
    assert found.attack == pytest.approx(2 * 3 * 4 * 0.1 / (2 * math.sqrt(2)))
    assert found.confidence == pytest.approx(3 * math.sqrt(2 * math.log(20) / 4))
    assert found.bound == pytest.approx(found.margin_errors + found.complexity + found.attack + found.confidence)
    assert found.worst_class_error_in_training == 0.0
    flipped = linear_bound(weights, x, y, eps=0.5, other=(x, y))  # 2 - 0.5 · 4 = 0: taken over
    assert flipped.worst_class_error == flipped.worst_class_error_in_training == 1.0


@pytest.mark.parametrize(("p", "q"), [(1.0, math.inf), (2.0, 2.0), (math.inf, 1.0)])
def test_complexity_averages_over_all_signs(p: float, q: float) -> None:
    random = np.random.default_rng(0)
    x, y = random.uniform(0, 1, (8, 3)), np.arange(8) % 2
    exact = max(
        np.mean([np.linalg.norm(np.array(signs) @ x[y == label], q) for signs in product([-1, 1], repeat=4)])
        for label in (0, 1)
    )
    found = linear_bound(random.normal(size=(2, 3)), x, y, eps=0.1, p=p, draws=40_000)
    assert found.complexity == pytest.approx(2 * found.norm * 8 * exact / 8, rel=0.02)
    assert found.attack == pytest.approx(2 * found.norm * 4 * 0.1 * 3 ** (1 / q) / math.sqrt(8))


def test_robust_margins_match_the_strongest_attack() -> None:
    """Compare with all corners of the ball, among which is the strongest attack on a linear model."""
    random = np.random.default_rng(1)
    weights, x, y = random.normal(size=(4, 3)), random.normal(size=(10, 3)), random.integers(0, 4, 10)
    corners = 0.2 * np.array(list(product([-1, 1], repeat=3)))
    for i in range(10):
        scores = (x[i] + corners) @ weights.T
        rivals = np.delete(scores, y[i], axis=1).max(1)
        assert robust_margins(weights, x, y, 0.2)[i] == pytest.approx((scores[:, y[i]] - rivals).min())


def test_on_a_run(tmp_path: Path) -> None:
    cw.train("digits/wat", out=tmp_path / "wat", epochs=4, attack={"steps": 1}, policy={"name": "wat", "eta": 0.1})
    found = bound(tmp_path / "wat", draws=5)
    assert found.no_regret is not None
    assert (found.no_regret.rounds, found.no_regret.eta) == (4, 0.1)
    assert found.no_regret.worst_class_loss <= found.no_regret.bound
    assert found.linear.worst_class_error is not None
    assert found.linear.worst_class_error <= min(1.0, found.linear.bound)
    assert len(found.figures()) == 2
    assert found.frame["round"].tolist() == [1, 2, 3, 4]
    assert "Theorem 1 holds" in found.finding


def test_runs_without_bound(trained: Path, make_run) -> None:
    found = bound(trained, draws=2)
    assert found.no_regret is None
    assert "was not trained by wat" in found.finding
    assert len(found.figures()) == 1
    with pytest.raises(InputError, match="not the directory of a training"):
        bound(make_run("run", [[1, 0], [0, 1]]))
    with pytest.raises(InputError, match="expected gamma > 0"):
        bound(trained, gamma=0.0)
