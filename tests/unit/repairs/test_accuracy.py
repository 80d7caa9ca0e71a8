"""Class accuracies under biases: counted ones against definitions, smooth ones against derivatives and theory."""

# N examples, K classes

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from classwise.repairs.accuracy import BANDWIDTH, ClassAccuracy, tenth_of


def random_margins(num_classes: int, each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Margins of classes of different strength, in no order."""
    random = np.random.default_rng(seed)
    label = random.permutation(np.repeat(np.arange(num_classes), each))
    level = np.linspace(0.2, 1.5, num_classes)
    margins = random.normal(level[label][:, None], 1, (len(label), num_classes))
    margins[np.arange(len(label)), label] = np.inf
    return margins, label


def counted(margins: np.ndarray, label: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """The accuracy of each class, example by example and class by class."""
    right = np.zeros(len(biases))
    for row, y in enumerate(label):
        others = [j for j in range(len(biases)) if j != y]
        right[y] += all(margins[row, j] + biases[y] - biases[j] > 0 for j in others)
    return right / np.bincount(label, minlength=len(biases))


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(num_classes=st.integers(2, 6), each=st.integers(1, 12), seed=seeds)
def test_counted_accuracies(num_classes: int, each: int, seed: int) -> None:
    margins, label = random_margins(num_classes, each, seed)
    biases = np.random.default_rng(seed).normal(0, 1, num_classes)
    accuracy = ClassAccuracy.of(margins, label, bandwidth=0)
    np.testing.assert_allclose(accuracy.values(biases), counted(margins, label, biases), rtol=1e-12)
    kept = accuracy.kept(biases)
    assert set(np.unique(kept)) <= {0.0, 1.0}
    rows = np.flatnonzero(label == num_classes - 1)
    assert kept[rows].mean() == pytest.approx(counted(margins, label, biases)[-1])


def test_margin_of_zero_is_broken_and_the_label_column_is_ignored() -> None:
    margins, label = np.array([[-9.0, 0.0], [0.5, -9.0], [0.0, 0.5]]), np.array([0, 1, 1])
    assert ClassAccuracy.of(margins, label, bandwidth=0).values(np.zeros(2)).tolist() == [0.0, 0.5]
    assert ClassAccuracy.of(margins, label, bandwidth=0).values(np.array([0.25, 0.0])).tolist() == [1.0, 0.5]


def test_input_is_not_changed() -> None:
    margins, label = random_margins(3, 20)
    margins[np.arange(60), label] = 0
    before = margins.copy()
    ClassAccuracy.of(margins, label).slopes(np.zeros(3))
    np.testing.assert_array_equal(margins, before)


def test_a_class_without_examples_is_nan() -> None:
    margins, label = random_margins(4, 10)
    rows = label != 2
    for bandwidth in (0.0, BANDWIDTH):
        accuracy = ClassAccuracy.of(margins[rows], label[rows], bandwidth=bandwidth)
        assert np.isnan(accuracy.values(np.zeros(4))).tolist() == [False, False, True, False]
        assert accuracy.counts.tolist() == [10, 10, 0, 10]


def test_subset_keeps_its_kernel_widths() -> None:
    margins, label = random_margins(4, 30)
    biases = np.array([0.3, -0.2, 0.1, -0.2])
    accuracy, rows = ClassAccuracy.of(margins, label), np.arange(0, 120, 3)
    part = accuracy.take(rows)
    np.testing.assert_array_equal(part.kept(biases), accuracy.kept(biases)[rows])
    expected = [accuracy.kept(biases)[rows][label[rows] == one].mean() for one in range(4)]
    np.testing.assert_allclose(part.values(biases), expected, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(num_classes=st.integers(2, 6), each=st.integers(2, 20), seed=seeds)
def test_slopes_are_derivatives(num_classes: int, each: int, seed: int) -> None:
    margins, label = random_margins(num_classes, each, seed)
    biases = np.random.default_rng(seed).normal(0, 0.5, num_classes)
    accuracy = ClassAccuracy.of(margins, label)
    values, slopes = accuracy.slopes(biases)
    np.testing.assert_allclose(values, accuracy.values(biases), rtol=1e-12)
    np.testing.assert_allclose(slopes.sum(axis=1), 0, atol=1e-9 * (1 + np.abs(slopes).max()))
    step = 1e-5
    nearest = [
        accuracy.effective(biases + move)[1] for move in (*step * np.eye(num_classes), *-step * np.eye(num_classes))
    ]
    if any((one != accuracy.effective(biases)[1]).any() for one in nearest):
        return  # at a corner between two classes there are two derivatives
    for one in range(num_classes):
        move = step * np.eye(num_classes)[one]
        numerical = (accuracy.values(biases + move) - accuracy.values(biases - move)) / (2 * step)
        np.testing.assert_allclose(slopes[:, one], numerical, rtol=1e-4, atol=1e-5 * (1 + np.abs(slopes).max()))


def test_slopes_exchange_density_between_classes() -> None:
    """Of normal margins with two classes the slope is the normal density at the boundary."""
    random = np.random.default_rng(0)
    each, mean, spread = 200_000, 0.4, 1.3
    label = np.repeat([0, 1], each)
    margins = np.where(label == 0, random.normal(mean, spread, 2 * each), 5.0)[:, None].repeat(2, axis=1)
    accuracy = ClassAccuracy.of(margins, label)
    for bias in (-0.5, 0.0, 0.8):
        values, slopes = accuracy.slopes(np.array([bias, 0.0]))
        assert values[0] == pytest.approx(norm.cdf((mean + bias) / spread), abs=0.005)
        assert slopes[0, 0] == pytest.approx(norm.pdf((mean + bias) / spread) / spread, rel=0.02)
        assert slopes[0, 1] == -slopes[0, 0]


@settings(max_examples=40, deadline=None)
@given(
    num_classes=st.integers(2, 6),
    constant=st.integers(-64, 64).map(lambda number: number / 16),
    smooth=st.booleans(),
    seed=seeds,
)
def test_constant_added_to_all_biases_has_no_effect(num_classes: int, constant: float, smooth: bool, seed: int) -> None:
    margins, label = random_margins(num_classes, 9, seed)
    biases = np.random.default_rng(seed).integers(-40, 40, num_classes) / 16
    accuracy = ClassAccuracy.of(margins, label, bandwidth=BANDWIDTH * smooth)
    np.testing.assert_allclose(accuracy.values(biases + constant), accuracy.values(biases), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    num_classes=st.integers(2, 6),
    each=st.integers(2, 15),
    raised=st.floats(0, 5),
    bandwidth=st.sampled_from([0.0, 0.4, BANDWIDTH, 9.0]),
    data=st.data(),
    seed=seeds,
)
def test_higher_bias_raises_its_class_only(
    num_classes: int, each: int, raised: float, bandwidth: float, data: st.DataObject, seed: int
) -> None:
    margins, label = random_margins(num_classes, each, seed)
    biases = np.random.default_rng(seed).normal(0, 1, num_classes)
    one = data.draw(st.integers(0, num_classes - 1))
    accuracy = ClassAccuracy.of(margins, label, bandwidth=bandwidth)
    change = accuracy.values(biases + raised * np.eye(num_classes)[one]) - accuracy.values(biases)
    assert change[one] >= -1e-12
    assert (np.delete(change, one) <= 1e-12).all()


def test_narrow_kernel_equals_counting() -> None:
    margins, label = random_margins(5, 200)
    biases = np.array([0.4, -0.1, 0.0, 0.2, -0.5])
    expected = ClassAccuracy.of(margins, label, bandwidth=0).values(biases)
    errors = [
        np.abs(ClassAccuracy.of(margins, label, bandwidth=width).values(biases) - expected).max()
        for width in (BANDWIDTH, 0.1, 1e-3, 1e-6)
    ]
    assert errors[0] > errors[2]
    assert errors[-1] < 1e-9


def test_order_of_examples_has_no_effect() -> None:
    margins, label = random_margins(4, 25)
    order = np.random.default_rng(1).permutation(len(label))
    biases = np.array([0.2, 0.0, -0.3, 0.1])
    first, second = ClassAccuracy.of(margins, label), ClassAccuracy.of(margins[order], label[order])
    np.testing.assert_allclose(first.values(biases), second.values(biases), rtol=1e-12)
    np.testing.assert_allclose(first.slopes(biases)[1], second.slopes(biases)[1], rtol=1e-9)


def test_equal_margins() -> None:
    label = np.repeat([0, 1], 10)
    margins = np.where(label == 0, 0.5, -0.5)[:, None].repeat(2, axis=1)
    accuracy = ClassAccuracy.of(margins, label)
    values, slopes = accuracy.slopes(np.zeros(2))
    assert values.tolist() == [1.0, 0.0]
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("mean", [-0.8, 0.0, 0.5, 1.5])
def test_normal_margins_are_estimated_without_bias(mean: float) -> None:
    """The estimate is that of the true normal distribution, with less noise than a count of 100 examples."""
    spread, draws, each = 2.0, 800, 100
    random = np.random.default_rng(int(10 * mean + 20))
    smooth, counts = [], []
    for _ in range(draws):
        margins = random.normal(mean * spread, spread, (each, 1)).repeat(2, axis=1)
        label = np.zeros(each, dtype=np.int64)
        smooth.append(ClassAccuracy.of(margins, label).values(np.zeros(2))[0])
        counts.append(ClassAccuracy.of(margins, label, bandwidth=0).values(np.zeros(2))[0])
    truth = norm.cdf(mean)
    error = np.std(smooth) / np.sqrt(draws)
    assert abs(np.mean(smooth) - truth) < 4 * error + 0.003
    assert np.std(counts) == pytest.approx(np.sqrt(truth * (1 - truth) / each), rel=0.2)
    assert np.std(smooth) < 0.93 * np.std(counts)


def test_uncorrected_variance_biases_the_estimate_towards_one_half() -> None:
    """A kernel of width h turns Phi(mu / s) into Phi(mu / sqrt(s^2 + h^2)), which is another number."""
    random = np.random.default_rng(0)
    each = 100_000
    margins = random.normal(1.0, 1.0, (each, 1)).repeat(2, axis=1)
    label = np.zeros(each, dtype=np.int64)
    wide = 6.0  # of 100,000 examples: 0.6 spreads
    value = ClassAccuracy.of(margins, label, bandwidth=wide).values(np.zeros(2))[0]
    pulled = norm.cdf(1 / np.sqrt(1 + (wide * each**-0.2) ** 2))
    assert abs(pulled - norm.cdf(1)) > 0.03
    assert value == pytest.approx(norm.cdf(1), abs=0.004)


def test_the_weakest_tenth() -> None:
    assert [tenth_of(number) for number in (1, 2, 10, 11, 20, 100, 1000)] == [1, 1, 1, 2, 2, 10, 100]
