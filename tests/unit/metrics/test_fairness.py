from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.metrics import class_variance, max_class_difference, rho

percent = st.floats(0, 100).map(lambda value: round(value, 4))
classes = st.lists(st.one_of(percent, st.just(math.nan)), min_size=1, max_size=20)


@given(classes)
@settings(deadline=None, max_examples=200)
def test_spread_of_the_classes_that_are_present(accuracies):
    present = [value for value in accuracies if not math.isnan(value)]
    assume(present)
    assert class_variance(accuracies) == pytest.approx(statistics.pvariance(present), rel=1e-9, abs=1e-9)
    assert max_class_difference(accuracies) == max(present) - min(present)


@given(st.lists(percent, min_size=2, max_size=12))
@settings(deadline=None, max_examples=100)
def test_difference_bounds_variance(accuracies):
    cv, mcd = class_variance(accuracies), max_class_difference(accuracies)
    assert mcd**2 / (2 * len(accuracies)) <= cv + 1e-9
    assert cv <= mcd**2 / 4 + 1e-9


@pytest.mark.parametrize("accuracies", [[], [math.nan], [math.nan, math.nan]])
def test_spread_of_no_class_is_none(accuracies):
    assert class_variance(accuracies) is None
    assert max_class_difference(accuracies) is None


def test_one_class_has_no_spread():
    assert class_variance([73.0, math.nan]) == 0
    assert max_class_difference([73.0, math.nan]) == 0


def test_rho_by_hand():
    # The worst class gains a half of 20, the average loses a tenth of 50.
    assert rho(average=45, worst=30, baseline_average=50, baseline_worst=20) == pytest.approx(0.5 - 0.1)
    # A gain on average counts as well.
    assert rho(average=55, worst=20, baseline_average=50, baseline_worst=20) == pytest.approx(0.1)
    assert rho(average=0, worst=0, baseline_average=50, baseline_worst=20) == -2


@given(st.floats(0.01, 100), st.floats(0.01, 100))
@settings(deadline=None, max_examples=50)
def test_rho_of_the_baseline_itself_is_zero(average, worst):
    assert rho(average=average, worst=worst, baseline_average=average, baseline_worst=worst) == 0


@pytest.mark.parametrize(("average", "worst"), [(50, 0), (0, 0), (0, 20)])
def test_rho_against_a_zero_baseline_is_undefined(average, worst):
    assert rho(average=40, worst=30, baseline_average=average, baseline_worst=worst) is None


@pytest.mark.parametrize(("average", "worst"), [(-1, 20), (50, -20)])
def test_rho_rejects_negative_accuracies(average, worst):
    with pytest.raises(InputError, match="cannot be negative"):
        rho(average=40, worst=30, baseline_average=average, baseline_worst=worst)
