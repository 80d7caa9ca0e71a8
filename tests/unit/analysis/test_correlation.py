"""Coefficients against scipy; intervals against their formulas and their coverage."""

# K classes

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, pearsonr, permutation_test, spearmanr

from classwise.analysis.correlation import pearson, spearman


@given(st.integers(0, 2**32 - 1), st.integers(4, 40))
def test_pearson_matches_scipy(seed: int, k: int) -> None:
    x, y = np.random.default_rng(seed).normal(size=(2, k))
    found, expected = pearson(x.tolist(), y.tolist()), pearsonr(x, y)
    low, high = expected.confidence_interval(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((expected.statistic, low, high), abs=6e-5)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.n == k


@given(st.integers(0, 2**32 - 1), st.integers(4, 40))
def test_spearman_matches_scipy_with_ties(seed: int, k: int) -> None:
    x, y = np.random.default_rng(seed).integers(0, 5, size=(2, k)).astype(float)
    found = spearman(x.tolist(), y.tolist())
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert found.value is None
        return
    r = spearmanr(x, y).statistic
    assert found.value == pytest.approx(r, abs=6e-5)
    if abs(r) < 1 - 1e-9:
        half = norm.ppf(0.975) * np.sqrt((1 + r**2 / 2) / (k - 3))
        ends = np.tanh([np.arctanh(r) - half, np.arctanh(r) + half])
        assert (found.low, found.high) == pytest.approx(tuple(ends), abs=6e-5)


def test_spearman_p_value_matches_exact_permutation_test() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 1.0, 4.0, 3.0, 6.0, 5.0]
    exact = permutation_test(
        (x,), lambda shuffled: spearmanr(shuffled, y).statistic, permutation_type="pairings", n_resamples=np.inf
    )
    # 2000 permutations tell a p near 0.06 to within 0.02 all but once in ten thousand times, and the seed is fixed.
    assert spearman(x, y).p_value == pytest.approx(exact.pvalue, abs=0.02)
    assert spearman(x, y, seed=3) == spearman(x, y, seed=3)


def test_intervals_have_nominal_coverage() -> None:
    random = np.random.default_rng(0)
    true = 0.6
    x = random.normal(size=(1000, 30))
    y = true * x + np.sqrt(1 - true**2) * random.normal(size=x.shape)
    rank = 6 / np.pi * np.arcsin(true / 2)  # Spearman's coefficient of a normal distribution
    for coefficient, expected in ((pearson, true), (spearman, rank)):
        found = [coefficient(a.tolist(), b.tolist()) for a, b in zip(x[:400], y[:400], strict=True)]
        held = sum(one.low <= expected <= one.high for one in found)
        assert 0.92 * 400 <= held <= 0.98 * 400


def test_undefined_coefficients() -> None:
    for x, y in (([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]), ([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), ([], [])):
        for found in (pearson(x, y), spearman(x, y)):
            assert (found.value, found.low, found.high, found.p_value) == (None, None, None, None)
            assert str(found) == "–"
    absent = pearson([1.0, None, 3.0, 4.0, 6.0, 9.0], [1.0, 2.0, None, 4.0, 5.0, 1.0])
    assert absent.n == 4
    assert absent.value == pytest.approx(pearsonr([1, 4, 6, 9], [1, 4, 5, 1]).statistic, abs=6e-5)


def test_perfect_correlation_has_zero_length_interval() -> None:
    for found in (
        pearson([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]),
        spearman([1.0, 2.0, 3.0, 9.0], [4.0, 3.0, 2.0, 1.0]),
    ):
        assert abs(found.value) == 1
        assert found.low == found.value == found.high
