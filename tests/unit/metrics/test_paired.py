from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chi2
from statsmodels.stats.contingency_tables import mcnemar as theirs
from statsmodels.stats.multitest import multipletests

from classwise.metrics import mcnemar, paired_changes
from classwise.metrics.comparison import holm


def two_sided_by_hand(gained: int, lost: int) -> float:
    """Twice the tail of a fair coin, as exact integers until the last division."""
    n, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


@given(st.integers(0, 120), st.integers(0, 120))
@settings(deadline=None, max_examples=200)
def test_mcnemar_sums_the_binomial_tail(gained, lost):
    assert mcnemar(gained, lost) == pytest.approx(two_sided_by_hand(gained, lost), rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


@given(st.integers(0, 300), st.integers(0, 300))
@settings(deadline=None, max_examples=100)
def test_mcnemar_is_that_of_statsmodels(gained, lost):
    assert mcnemar(gained, lost) == pytest.approx(theirs([[7, lost], [gained, 11]], exact=True).pvalue, rel=1e-9)


@pytest.mark.parametrize(("gained", "lost"), [(5100, 4900), (4900, 5150), (5000, 5000)])
def test_mcnemar_approaches_the_chi_squared_form(gained, lost):
    # The textbook's statistic with the continuity correction, for large counts.
    statistic = max(abs(gained - lost) - 1, 0) ** 2 / (gained + lost)
    assert mcnemar(gained, lost) == pytest.approx(chi2.sf(statistic, 1), abs=1e-3)


def test_mcnemar_of_no_discordant_pairs():
    assert mcnemar(0, 0) == 1


def holm_by_definition(p_values: list[float]) -> list[float]:
    """Holm (1979): the largest (m - k + 1) p(k) over all k up to the rank of the p-value, at most one."""
    m, ordered = len(p_values), sorted(p_values)
    return [min(1.0, max((m - k) * ordered[k] for k in range(ordered.index(p) + 1))) for p in p_values]


# Distinct values: between equal ones the ranks, and so the definition above, are arbitrary.
@given(st.lists(st.floats(0, 1), max_size=15, unique=True))
@settings(deadline=None, max_examples=200)
def test_holm_is_the_textbook_definition(p_values):
    assert holm(p_values) == pytest.approx(holm_by_definition(p_values), rel=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
@settings(deadline=None, max_examples=8)
def test_holm_is_that_of_statsmodels(p_values):
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), rel=1e-9)


def test_family_wise_error_rate_is_at_most_five_percent():
    """Ten classes, two equally good models, random differences: the family-wise error rate of all ten tests."""
    rng, times = np.random.default_rng(3), 400
    flips = rng.poisson(20, size=(times, 10))
    gained = rng.binomial(flips, 0.5)
    cases = {(int(a), int(b - a)) for a, b in zip(gained.flat, flips.flat, strict=True)}
    p_values = {case: mcnemar(*case) for case in cases}
    raw = [
        [p_values[a, b - a] for a, b in zip(row, all_, strict=True)] for row, all_ in zip(gained, flips, strict=True)
    ]
    corrected = sum(min(holm(row)) < 0.05 for row in raw)
    assert binomtest(corrected, times, 0.05, alternative="greater").pvalue > 0.01
    assert sum(min(row) < 0.05 for row in raw) > 0.2 * times  # without the correction it is far more


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.04, 0.04]) == pytest.approx([0.08, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
@settings(deadline=None, max_examples=100)
def test_holm_keeps_the_order_and_never_shrinks(p_values):
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()


def test_paired_changes_by_hand():
    labels = np.array([0] * 12 + [2] * 4)
    before = np.array([False] * 8 + [True] * 4 + [True, True, False, True])
    after = np.array([True] * 8 + [True] * 3 + [False] + [True, False, True, True])
    airplane, bird = paired_changes(labels, before, after, num_classes=4)

    assert (airplane.label, airplane.gained, airplane.lost, airplane.n) == (0, 8, 1, 12)
    assert (bird.label, bird.gained, bird.lost, bird.n) == (2, 1, 1, 4)
    # Two classes were compared; the first alone has p = 2 (1 + 9) / 2^9.
    assert airplane.p_value == pytest.approx(2 * 20 / 512)
    assert bird.p_value == 1


def test_paired_changes_without_examples():
    nothing = np.array([], dtype=bool)
    assert paired_changes(np.array([], dtype=np.int64), nothing, nothing, num_classes=3) == []
