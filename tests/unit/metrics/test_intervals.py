from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from classwise.metrics import wilson, worst_class

# Robust accuracy by class of two CIFAR-10 models under a strong attack: plain TRADES, and one of its fair variants.
PROFILES = {
    "trades": [59.5, 72.3, 29.1, 21.1, 25.3, 41.3, 47.4, 57.6, 65.7, 64.8],
    "wat": [54.1, 64.4, 34.4, 31.7, 26.7, 37.7, 37.9, 53.9, 60.1, 62.3],
    "equal": [50.0] * 10,
    "two low": [30.0] * 2 + [60.0] * 8,
}


@st.composite
def counts(draw):
    n = draw(st.integers(1, 20_000))
    return draw(st.one_of(st.just(0), st.just(n), st.integers(0, n))), n


@given(counts(), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
@settings(deadline=None, max_examples=300)
def test_wilson_is_that_of_scipy(case, level):
    correct, n = case
    low, high = wilson(correct, n, level)
    theirs = binomtest(correct, n).proportion_ci(confidence_level=level, method="wilson")
    assert float(low) == pytest.approx(theirs.low, abs=1e-12)
    assert float(high) == pytest.approx(theirs.high, abs=1e-12)
    assert 0 <= low <= correct / n <= high <= 1


def test_wilson_is_elementwise_and_unknown_without_examples():
    low, high = wilson([0, 3, 0, 10], [0, 4, 5, 10])
    assert np.isnan(low).tolist() == np.isnan(high).tolist() == [True, False, False, False]
    assert (low[2], high[3]) == (0, 1)
    assert (low[1], high[1]) == tuple(float(bound) for bound in wilson(3, 4))


@functools.cache
def simulated(profile: str, n: int, times: int = 1000) -> dict[str, float]:
    """How often the intervals of the worst class hold the lowest true share, and the bias of its estimates."""
    shares = np.array(PROFILES[profile]) / 100
    measured = np.random.default_rng(20230).binomial(n, shares, size=(times, shares.size))
    found = [worst_class(correct, np.full(shares.size, n), draws=150) for correct in measured]
    true = shares.min()
    return {
        "covered": np.mean([part.corrected_low <= true <= part.corrected_high for part in found]),
        "covered_raw": np.mean([part.low <= true <= part.high for part in found]),
        "bias": np.mean([part.corrected for part in found]) - true,
        "bias_raw": np.mean([part.value for part in found]) - true,
    }


@pytest.mark.parametrize("n", [70, 200, 1000])
@pytest.mark.parametrize("profile", PROFILES)
def test_corrected_interval_covers_the_lowest_true_share(profile, n):
    # Nominal is 95 %; 91 % is left for the approximation, and 1000 simulations tell the two apart (4 se = 2.8 %).
    assert simulated(profile, n)["covered"] >= 0.91


@pytest.mark.parametrize("n", [70, 200, 1000])
def test_uncorrected_interval_misses_the_lowest_share_of_equal_classes(n):
    assert simulated("equal", n)["covered_raw"] < 0.85


@pytest.mark.parametrize("n", [70, 200, 1000])
def test_correction_removes_most_of_the_bias_on_equal_classes(n):
    found = simulated("equal", n)
    # The mean of the smallest of ten normal values lies 1.54 standard deviations low.
    assert found["bias_raw"] == pytest.approx(-1.54 * np.sqrt(0.25 / n), rel=0.1)
    # A third stays: no estimate of a minimum is let above the mean of the classes, where half of them would lie.
    assert abs(found["bias"]) < abs(found["bias_raw"]) / 3


def test_worst_class_is_the_lowest_share_with_its_own_interval():
    correct, n = [40, 9, 60], [50, 30, 100]
    found = worst_class(correct, n)
    assert (found.label, found.value) == (1, 0.3)
    theirs = binomtest(9, 30).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    shift = found.corrected - found.value
    assert shift >= 0
    assert found.corrected_low == found.low
    assert found.corrected_high - found.high == pytest.approx(shift)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12).flatmap(
        lambda n: st.tuples(st.tuples(*(st.integers(0, size) for size in n)), st.just(n))
    )
)
def test_a_minimum_never_exceeds_the_mean(counts):
    correct, n = counts
    found = worst_class(correct, n, draws=200)
    assert found.value - 1e-12 <= found.corrected <= np.mean(np.divide(correct, n)) + 1e-12
    assert 0 <= found.corrected_low <= found.corrected + 1e-12
    assert found.corrected <= found.corrected_high + 1e-12 <= 1 + 1e-12


def test_absent_classes_are_ignored_but_keep_their_numbers():
    with_gaps = worst_class([0, 40, 0, 9, 60], [0, 50, 0, 30, 100])
    without = worst_class([40, 9, 60], [50, 30, 100])
    assert (with_gaps.label, without.label) == (3, 1)
    for name in ("value", "low", "high", "corrected", "corrected_low", "corrected_high"):
        assert getattr(with_gaps, name) == getattr(without, name)


@pytest.mark.parametrize("n", [[], [0], [0, 0, 0]])
def test_no_class_present(n):
    assert worst_class([0] * len(n), n) is None


def test_one_class_needs_no_correction():
    found = worst_class([0, 30], [0, 100])
    assert (found.label, found.value) == (1, 0.3)
    assert (found.corrected, found.corrected_low, found.corrected_high) == (found.value, found.low, found.high)


@given(st.lists(counts(), min_size=1, max_size=12))
@settings(deadline=None, max_examples=50)
def test_corrected_values_are_shares_in_order(cases):
    correct, n = np.array(cases).T
    found = worst_class(correct, n, draws=50)
    assert found.value == (correct / n).min()
    assert 0 <= found.corrected_low <= found.corrected <= found.corrected_high <= 1
    assert found.value <= found.corrected  # the smallest of several is never too high on average


def test_same_seed_same_interval():
    correct, n = [35, 32, 60], [70, 70, 70]
    assert worst_class(correct, n) == worst_class(correct, n, seed=0)
    assert worst_class(correct, n).corrected != worst_class(correct, n, seed=1).corrected
