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
from classwise.analysis.bound import linear_bound, no_regret, robust_margins, worst_class_error
from classwise.core.errors import InputError


def test_theorem_1_by_hand() -> None:
    """Two classes and their average, two rounds, eta = 1/2.

    Round 1: weights 1/3, so (0.2 + 0.8 + 0.5) / 3 = 0.5. Round 2: weights in proportion to e^0.1, e^0.4, e^0.25.
    """
    found, failed = no_regret([[0.2, 0.8, 0.5], [0.4, 0.6, 0.5]], eta=0.5)
    raw = [math.exp(0.1), math.exp(0.4), math.exp(0.25)]
    second = (0.4 * raw[0] + 0.6 * raw[1] + 0.5 * raw[2]) / sum(raw)
    assert found["round"].tolist() == [1, 2]
    assert found["loss"].tolist() == [0.8, 0.6]
    assert found["bound"].tolist() == pytest.approx([0.5 + 2 * math.log(3), (0.5 + second) / 2 + math.log(3)])
    # eta is small enough: 0.5 · 0.8 = 0.4. The mean of class 0 is 0.3, and 0.2 / (1 - 0.4) = 0.33 is more.
    assert failed == ["mean losses"]
    assert no_regret([[0.2, 0.8, 0.5], [0.4, 0.6, 0.5]], eta=0.7)[1] == ["eta", "mean losses"]
    assert no_regret([[0.2, 0.8, 0.5], [0.4, 0.6, 0.5]], eta=0.1)[1] == []


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 30), st.floats(0.01, 5.0))
def test_theorem_1_holds_where_its_assumptions_do(seed: int, k: int, rounds: int, scale: float) -> None:
    """The theorem holds for any losses; B is their scale."""
    random = np.random.default_rng(seed)
    by_class = scale * random.uniform(0, 1, (rounds, k))
    found, failed = no_regret(np.column_stack([by_class, by_class.mean(1)]), eta=0.5 / scale)
    if not failed:
        assert found["loss"].iloc[-1] <= found["bound"].iloc[-1]


def test_theorem_3_by_hand() -> None:
    """K = 2, one example a class, so the signs do not matter: U = max ‖x‖_inf = 2. W = 3 (p = 1), d = 2."""
    weights, x, y = np.array([[1.0, -2.0], [0.0, 1.0]]), np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0, 1])
    # margins: 2 - 0 - 0.1 · 4 = 1.6 and 1 - (-2) - 0.4 = 2.6
    assert robust_margins(weights, x, y, 0.1).tolist() == pytest.approx([1.6, 2.6])
    found = linear_bound(weights, x, y, eps=0.1, gamma=2.0, delta=0.1, draws=3)
    assert found["margin errors"] == 2 * 0.5
    assert found["complexity"] == pytest.approx(2 * 3 * 8 * 2 / (2 * 2))
    assert found["attack"] == pytest.approx(2 * 3 * 4 * 0.1 / (2 * math.sqrt(2)))
    assert found["confidence"] == pytest.approx(3 * math.sqrt(2 * math.log(20) / 4))
    assert found["bound"] == pytest.approx(found[["margin errors", "complexity", "attack", "confidence"]].sum())
    assert worst_class_error(weights, x, y, 0.1) == 0.0
    assert worst_class_error(weights, x, y, 0.5) == 1.0  # 2 - 0.5 · 4 = 0: taken over


def test_complexity_averages_over_all_signs() -> None:
    random = np.random.default_rng(0)
    x, y = random.uniform(0, 1, (8, 3)), np.arange(8) % 2
    exact = max(
        np.mean([np.abs(np.array(signs) @ x[y == label]).max() for signs in product([-1, 1], repeat=4)])
        for label in (0, 1)
    )
    weights = random.normal(size=(2, 3))
    norm = np.abs(weights).sum(1).max()
    found = linear_bound(weights, x, y, eps=0.1, draws=40_000)
    assert found["complexity"] == pytest.approx(2 * norm * 8 * exact / 8, rel=0.02)
    assert found["attack"] == pytest.approx(2 * norm * 4 * 0.1 / math.sqrt(8))


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
    assert found.frame["round"].tolist() == [1, 2, 3, 4]
    first, *_, last = found.frame.itertuples()
    assert first.bound - math.log(11) / 0.1 < first.loss  # eta = 0.1: the rest is a mean loss in the first round
    assert last.loss <= last.bound
    error = found.frames["errors"].query("split == 'test'")["worst_class_error"].item()
    assert error <= min(1.0, found.frames["Theorem 3"].set_index("term").loc["bound", "error_bound"])
    assert f"measured {error:.3f}" in found.finding
    assert len(found.figures()) == 2
    assert "Theorem 1 holds" in found.finding


def test_runs_without_bound(trained: Path, make_run) -> None:
    found = bound(trained, draws=2)
    assert found.frame.empty
    assert "was not trained by wat" in found.finding
    assert len(found.figures()) == 1
    with pytest.raises(InputError, match="not the directory of a training"):
        bound(make_run("run", [[1, 0], [0, 1]]))
    with pytest.raises(InputError, match="expected gamma > 0"):
        bound(trained, gamma=0.0)
