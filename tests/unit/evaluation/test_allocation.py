from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

from classwise.evaluation import allocation
from classwise.evaluation.allocation import GROWTH, MINIMUM, Contenders
from classwise.metrics import wilson
from each import for_each

UNLIMITED = 10**7
# Robust accuracy by class.
PROFILES = {
    "as on CIFAR-10": [0.60, 0.72, 0.28, 0.20, 0.24, 0.38, 0.50, 0.58, 0.66, 0.63],
    "one clearly worst": [0.2, 0.5],
    "two tied": [0.3] * 2 + [0.6] * 8,
    "all equal": [0.5] * 10,
    "one just below": [0.30] + [0.33] * 9,
    "one clearly worst of 100": [0.2] + [0.5] * 99,
}


def first_round(available):
    return allocation.first_round(np.array(available))


def next_round(survived, done, available, half_width):
    return allocation.next_round(np.array(survived), np.array(done), np.array(available), half_width)


def summary(survived, done, available, half_width):
    return Contenders.of(np.array(survived), np.array(done), np.array(available), half_width)


def overall(survived, done, available):
    return allocation.overall(np.array(survived), np.array(done), np.array(available))


def bounds(survived: int, done: int, tail: float) -> tuple[float, float]:
    """Wilson's bounds with tail probability ``tail``, computed by another library."""
    found = binomtest(survived, done).proportion_ci(1 - 2 * tail, method="wilson")
    return found.low, found.high


@st.composite
def standings(draw, least_available=0):
    """Counts of two to eight classes, all after the first round."""
    available = draw(st.lists(st.integers(least_available, 3000), min_size=2, max_size=8))
    done = [draw(st.integers(min(MINIMUM, size), size)) for size in available]
    survived = [draw(st.integers(0, size)) for size in done]
    return np.array(survived), np.array(done), np.array(available)


half_widths = st.floats(0.005, 0.2)


# First round


def test_first_round_gives_every_class_its_minimum():
    assert first_round([1000, 50, 20, 1, 0]).tolist() == [50, 50, 20, 1, 0]
    assert next_round([0, 0, 0], [0, 0, 0], [1000, 20, 0], 0.02).tolist() == [50, 20, 0]


def test_incomplete_first_round_is_completed():
    assert next_round([1, 0, 5], [30, 0, 50], [1000, 1000, 1000], 0.02).tolist() == [20, 50, 0]


# Exact cases


def test_single_class_gets_the_examples_that_wilson_needs():
    # One class: both ends are its own. Close to the goal, one round must lead there and not far beyond.
    done, half_width = 1000, 0.025
    further = next_round([300], [done], [UNLIMITED], half_width)[0]

    def width(n):
        return bounds(round(0.3 * n), n, 0.025)[1] - bounds(round(0.3 * n), n, 0.0125)[0]

    enough = next(n for n in range(done, 10_000, 10) if width(n) <= 2 * half_width)
    assert enough <= done + further <= enough * 1.03


def test_round_grows_by_at_most_a_fixed_multiple():
    assert next_round([10], [50], [UNLIMITED], 0.001).tolist() == [(GROWTH - 1) * 50]


def test_round_has_a_minimum_size():
    # With 40 of 200, ± 6 points needs only a few examples more; the round is a quarter of what there is.
    low, high = bounds(40, 200, 0.0125)[0], bounds(40, 200, 0.025)[1]
    half_width = (high - low) / 2 - 1e-4
    assert next_round([40], [200], [UNLIMITED], half_width).tolist() == [50]
    assert next_round([40], [200], [210], half_width).tolist() == [10]


def test_only_contenders_get_more_examples():
    # 10 of 50 and 13 of 50 overlap; 40 of 50 lies clearly above both.
    further = next_round([10, 13, 40], [50, 50, 50], [UNLIMITED] * 3, 0.02)
    assert further[0] > 0
    assert further[1] > 0
    assert further[2] == 0
    assert summary([10, 13, 40], [50, 50, 50], [UNLIMITED] * 3, 0.02).labels.tolist() == [0, 1]


def test_summary_by_hand():
    # Classes 0 and 2 overlap, so the upper end allows 2.5 % / 2 to go wrong; class 1 is above, class 3 is empty.
    survived, done, available = [200, 900, 105, 0], [1000, 1000, 500, 0], [1000, 1000, 1000, 0]
    found = summary(survived, done, available, 0.05)
    low = min(bounds(200, 1000, 0.0125)[0], bounds(105, 500, 0.0125)[0])
    high = min(bounds(200, 1000, 0.0125)[1], bounds(105, 500, 0.0125)[1])
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert (found.leader, found.share[0], found.labels.tolist()) == (0, 0.2, [0, 2])
    assert found.reached
    assert next_round(survived, done, available, 0.05) is None


def test_rounds_end_when_all_examples_of_the_worst_class_are_used():
    survived, done, available = [20, 90], [100, 100], [100, 5000]
    assert next_round(survived, done, available, 0.02) is None
    found = summary(survived, done, available, 0.02)
    assert not found.reached
    assert found.high - found.low == pytest.approx(bounds(20, 100, 0.025)[1] - bounds(20, 100, 0.0125)[0])


def test_unreachable_goal_uses_all_available_examples():
    # ± 1 point is out of reach with 300 examples: all of the lowest class are wanted, and of the next only so many
    # as keep its lower bound from deciding.
    further = next_round([40, 70], [200, 200], [300, 300], 0.01)
    assert further.tolist() == [100, 0]
    lowest = bounds(60, 300, 0.0125)[0]
    assert bounds(70, 200, 0.0125)[0] > lowest
    # A rival that is nearly as low and barely known needs more too, but less than all.
    further = next_round([40, 12], [200, 50], [300, 300], 0.01)
    assert further[0] == 100
    assert bounds(round(0.24 * (50 + further[1])), int(50 + further[1]), 0.0125)[0] == pytest.approx(lowest, abs=0.005)


def test_one_low_class_saves_examples_of_many_others():
    # Ten classes, equal except for one: only the lowest needs its upper bound near, so it gets the most by far.
    further = next_round([99] + [100] * 9, [200] * 10, [UNLIMITED] * 10, 0.04)
    assert further[0] > 2 * further[1]
    assert len(set(further[1:])) == 1


def test_class_accuracy_of_zero_or_one():
    # None of n held: the interval is [0, z² / (n + z²)].
    z = norm.isf(0.025)
    assert not summary([0], [100], [1000], 0.018).reached
    needed = z**2 * (1 - 0.036) / 0.036
    assert next_round([0], [80], [1000], 0.018)[0] == max(20, int(np.ceil(needed)) - 80)
    assert summary([0], [int(np.ceil(needed))], [1000], 0.018).reached
    assert summary([0], [103], [1000], 0.018).low == 0
    assert summary([1000], [1000], [1000], 0.02).high == 1
    assert next_round([50, 50], [50, 50], [1000, 1000], 0.02).sum() > 0


@pytest.mark.parametrize("available", [[], [0], [0, 0]])
def test_no_class_with_examples(available):
    none, available = np.zeros(len(available), dtype=int), np.array(available, dtype=int)
    assert next_round(none, none, available, 0.02) is None
    assert np.isnan(overall(none, none, available)).all()


# Properties


@given(standings(), half_widths)
@settings(deadline=None)
def test_rounds_are_feasible_and_for_contenders(counts, half_width):
    survived, done, available = counts
    further = next_round(survived, done, available, half_width)
    if further is None:
        return
    found = summary(survived, done, available, half_width)
    assert not found.reached
    assert further.sum() > 0
    assert (further >= 0).all()
    assert (done + further <= np.minimum(available, GROWTH * done)).all()
    assert set(np.flatnonzero(further)) <= set(found.labels)


@given(standings(least_available=1), half_widths)
@settings(deadline=None)
def test_contenders_follow_wilson_bounds(counts, half_width):
    survived, done, available = counts
    low, high = np.transpose([bounds(int(s), int(n), 0.0125) for s, n in zip(survived, done, strict=True)])
    found = summary(survived, done, available, half_width)
    assert found.labels.tolist() == np.flatnonzero(low < high.min()).tolist()
    assert found.low == pytest.approx(low.min(), abs=1e-12)
    assert found.low <= (survived / done).min() <= found.share[found.leader] <= found.high


@given(standings(), half_widths, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_classes_has_no_effect(counts, half_width, random):
    order = list(range(len(counts[0])))
    random.shuffle(order)
    further = next_round(*counts, half_width)
    shuffled = next_round(*(part[order] for part in counts), half_width)
    assert (further is None) == (shuffled is None)
    if further is not None:
        assert further[order].tolist() == shuffled.tolist()


@given(standings(least_available=1), half_widths)
@settings(deadline=None)
def test_empty_classes_have_no_effect(counts, half_width):
    more = [np.insert(part, 1, 0) for part in counts]
    further, with_gap = next_round(*counts, half_width), next_round(*more, half_width)
    assert (further is None) == (with_gap is None)
    if further is not None:
        assert np.insert(further, 1, 0).tolist() == with_gap.tolist()
    assert overall(*counts) == overall(*more)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5000)), min_size=1, max_size=8),
    half_widths,
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_rounds_end_with_a_reason(classes, half_width, seed):
    shares, available = np.array([share for share, _ in classes]), np.array([size for _, size in classes])
    survived, done, rounds = attacked(np.random.default_rng(seed), shares, available, half_width)
    assert rounds <= 60
    if not available.any():
        assert rounds == 0
        return
    found = summary(survived, done, available, half_width)
    if found.reached:
        assert found.high - found.low <= 2 * half_width * (1 + 1e-8)
    else:
        # What decides the interval is used up: the classes with the lowest of the lower, and of the upper bounds. A
        # lower bound of 0, where no example held, does not rise with more of the same.
        low, _ = wilson(survived, done, 0.975)
        assert found.low == 0 or done[np.nanargmin(low)] == available[np.nanargmin(low)]
        assert found.done[found.leader] == found.available[found.leader]


# Simulation


def attacked(rng, shares, available, half_width):
    survived, done, rounds = np.zeros_like(available), np.zeros_like(available), 0
    while (further := next_round(survived, done, available, half_width)) is not None:
        survived, done, rounds = survived + rng.binomial(further, shares), done + further, rounds + 1
    return survived, done, rounds


@functools.cache
def simulated(profile: str, limit: int, half_width: float = 0.02) -> dict[str, np.ndarray]:
    shares = np.array(PROFILES[profile])
    available = np.full(shares.size, limit)
    rng = np.random.default_rng(20240)
    columns: dict[str, list[float]] = {
        name: [] for name in ("covered", "plain", "total", "rounds", "half_width", "average")
    }
    # Repeated looks do the most harm where one class lies just below many: only there does it take many runs to see.
    for _ in range(600 if profile == "one just below" else 150):
        survived, done, rounds = attacked(rng, shares, available, half_width)
        found = summary(survived, done, available, half_width)
        lowest = (survived / done).argmin()
        low, high = wilson(survived[lowest], done[lowest])
        _, average_low, average_high = overall(survived, done, available)
        columns["covered"].append(found.low <= shares.min() <= found.high)
        columns["plain"].append(low <= shares.min() <= high)
        columns["total"].append(done.sum())
        columns["rounds"].append(rounds)
        columns["half_width"].append((found.high - found.low) / 2)
        columns["average"].append(average_low <= shares.mean() <= average_high)
    return {name: np.array(values) for name, values in columns.items()}


@for_each(
    ("profile", "limit"),
    [
        *((profile, UNLIMITED) for profile in PROFILES),
        ("as on CIFAR-10", 1000),
        ("all equal", 1000),
        ("one clearly worst of 100", 100),
    ],
)
def test_interval_covers_the_lowest_true_accuracy(profile, limit):
    covered = simulated(profile, limit)["covered"]
    # More misses than this have a chance below 1 in 1000 where 95 % are covered.
    assert (~covered).sum() <= binom.isf(0.001, covered.size, 0.05)


def test_plain_interval_of_the_lowest_class_does_not_cover():
    plain = simulated("all equal", 1000)["plain"]
    assert (~plain).sum() > binom.isf(0.001, plain.size, 0.05)


@pytest.mark.parametrize("profile", PROFILES)
def test_goal_is_reached_with_little_overshoot(profile):
    half_width = simulated(profile, UNLIMITED)["half_width"]
    assert half_width.max() <= 0.02 * (1 + 1e-8)
    assert half_width.mean() >= 0.018


@pytest.mark.parametrize(("profile", "saving"), [("as on CIFAR-10", 4), ("one clearly worst of 100", 15)])
def test_most_examples_are_saved(profile, saving):
    # Evaluating every class alike to a plain ± 2 points in the worst takes p (1 - p) (1.96 / 0.02)² of each.
    shares = np.array(PROFILES[profile])
    alike = shares.size * 0.2 * 0.8 * (norm.isf(0.025) / 0.02) ** 2
    found = simulated(profile, UNLIMITED)
    assert found["total"].mean() < alike / saving
    assert found["rounds"].mean() < 6


# Overall


def test_overall_of_one_class_is_wilsons_interval():
    low, high = bounds(37, 120, 0.025)
    assert overall([37], [120], [900]) == pytest.approx((37 / 120, low, high), abs=1e-12)


def test_overall_of_equal_classes_is_wilsons_interval_of_all_examples():
    low, high = bounds(90, 300, 0.025)
    assert overall([30] * 3, [100] * 3, [900] * 3) == pytest.approx((0.3, low, high), abs=1e-12)
    low, high = bounds(0, 300, 0.025)
    assert overall([0] * 3, [100] * 3, [900] * 3) == pytest.approx((0, low, high), abs=1e-12)


def test_overall_weights_classes_by_size():
    value, low, high = overall([10, 90], [20, 100], [3000, 1000])
    assert value == pytest.approx(0.75 * 0.5 + 0.25 * 0.9)
    # The ends solve (p - b)² = z² b (1 - b) / n, where n is the binomial sample of the same variance.
    variance = 0.75**2 * (11 / 22) * (11 / 22) / 20 + 0.25**2 * (91 / 102) * (11 / 102) / 100
    center = 0.75 * 11 / 22 + 0.25 * 91 / 102
    spread = norm.isf(0.025) ** 2 * variance / (center * (1 - center))
    assert low < value < high
    for bound in (low, high):
        assert (value - bound) ** 2 == pytest.approx(spread * bound * (1 - bound))


@given(standings(least_available=1))
@settings(deadline=None)
def test_overall_is_inside_its_interval(counts):
    value, low, high = overall(*counts)
    assert 0 <= low <= value + 1e-12
    assert value - 1e-12 <= high <= 1


def test_overall_has_the_stratified_variance_for_large_samples():
    shares, done, size = np.array([0.2, 0.5, 0.7]), np.array([40_000, 90_000, 10_000]), np.array([1, 2, 5]) * 10**5
    weight = size / size.sum()
    half = norm.isf(0.025) * np.sqrt((weight**2 * shares * (1 - shares) / done).sum())
    value, low, high = overall(np.round(shares * done), done, size)
    assert (value - low, high - value) == pytest.approx((half, half), rel=0.01)


@pytest.mark.parametrize("shares", [*PROFILES.values(), [0.9] + [0.97] * 9, [0.0] * 5 + [0.05] * 5])
def test_overall_covers_after_the_first_round(shares):
    available = np.arange(1, len(shares) + 1) * 100
    done = first_round(available)
    true = np.average(shares, weights=available)
    drawn = np.random.default_rng(7).binomial(done, shares, size=(1000, len(shares)))
    missed = sum(not low <= true <= high for _, low, high in (overall(row, done, available) for row in drawn))
    assert missed <= binom.isf(0.001, 1000, 0.05)


def test_overall_is_biased_for_sizes_that_depend_on_results():
    assert simulated("all equal", UNLIMITED)["average"].mean() < 0.6
