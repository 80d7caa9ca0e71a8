"""Fits: cross-validated accuracies hold on other images, and the rules select what they state."""

# N examples, K classes

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.repairs.accuracy import ClassAccuracy, by_class
from classwise.repairs.fit import FOLDS, LEAST, RULES, Summary, assigned, fit
from classwise.repairs.frontier import WEIGHTS, Objective, best
from classwise.storage.margins import Margins


def table(levels: list[float], each: int | list[int], seed: int = 0) -> Margins:
    """Margins that are normal around the level of the class, and natural logits with wider ones."""
    random = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(levels)), each)
    size, num_classes = len(label), len(levels)
    attacked = random.normal(np.array(levels)[label], 1)[:, None] + random.exponential(0.7, (size, num_classes))
    natural = -attacked - 1.0
    for matrix, own in ((attacked, np.inf), (natural, 0.0)):
        matrix[np.arange(size), label] = own
    order = random.permutation(size)
    return Margins(
        index=np.arange(size),
        label=label[order],
        natural=natural[order].astype(np.float32),
        attacked=attacked[order].astype(np.float32),
        info={},
    )


UNEVEN = [0.0, 0.9, 1.4, 0.7]


def right(matrix: np.ndarray, label: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """(N,) whether each example stays correct, example by example."""
    return np.array(
        [
            all(matrix[row, j] + biases[y] - biases[j] > 0 for j in range(len(biases)) if j != y)
            for row, y in enumerate(label)
        ]
    )


def held_out_by_hand(
    margins: Margins, weight: float, *, folds: int = FOLDS, seed: int = 0, counted: bool = False
) -> Summary:
    """Fit without each fold, evaluate on it, and concatenate the folds."""
    fold = assigned(margins.label, folds, seed)
    whole = ClassAccuracy.of(margins.attacked, margins.label, **({"bandwidth": 0} if counted else {}))
    kept = np.zeros(len(margins))
    for one in range(folds):
        others = ClassAccuracy.of(margins.attacked[fold != one], margins.label[fold != one])
        kept[fold == one] = whole.kept(best(others, weight))[fold == one]
    counts = np.bincount(margins.label, minlength=margins.num_classes)
    return Summary.of(by_class(kept, margins.label, margins.num_classes), counts)


# -- honesty ----------------------------------------------------------------------------------------------


def test_held_out_accuracies() -> None:
    """On pure noise, the fitted worst class overestimates that on other examples, and the held-out one does so less.

    All classes have the same distribution, so no biases are better than zero. Averages over 24 draws of 60 examples per
    class. The held-out value is counted; the smooth one lies between the two. The average is unbiased. At the largest
    weight the smooth worst class remains too high, because its biases compensate the noise of the examples that the
    folds share.
    """
    levels, draws = [0.5] * 10, 24
    other = table(levels, 2000, seed=1)
    truth = ClassAccuracy.of(other.attacked, other.label, bandwidth=0)
    for weight in (1.0, WEIGHTS[-1]):
        above: dict[str, list[float]] = {"fitted": [], "smooth": [], "promised": [], "average": []}
        for draw in range(draws):
            margins = table(levels, 60, seed=100 + draw)
            whole = ClassAccuracy.of(margins.attacked, margins.label)
            biases = best(whole, weight)
            values, smooth = truth.values(biases), held_out_by_hand(margins, weight)
            above["fitted"].append(whole.values(biases).min() - values.min())
            above["smooth"].append(smooth.worst - values.min())
            above["promised"].append(held_out_by_hand(margins, weight, counted=True).worst - values.min())
            above["average"].append(smooth.average - values.mean())
        mean = {name: float(np.mean(each)) for name, each in above.items()}
        assert mean["promised"] < mean["smooth"] < mean["fitted"]
        assert abs(mean["average"]) < 3 * np.std(above["average"]) / np.sqrt(draws)
        if weight == 1:
            assert mean["promised"] < 0
        else:
            assert mean["fitted"] > 0.01


def test_held_out_survival_is_that_of_biases_fitted_without_the_image() -> None:
    margins = table(UNEVEN, 40)
    found = fit(margins, rule="worst", seed=5)
    point = next(point for point in found.points if point.weight == found.weight)
    fold = assigned(margins.label, FOLDS, 5)
    for one in range(FOLDS):
        others, rows = margins.take(np.flatnonzero(fold != one)), np.flatnonzero(fold == one)
        accuracy = ClassAccuracy.of(others.attacked, others.label)
        np.testing.assert_allclose(point.each[one], best(accuracy, found.weight), atol=0.01)
        for kept, matrix in (
            (found.held_out_robust, margins.attacked),
            (found.held_out_natural, margins.without_attack),
        ):
            np.testing.assert_array_equal(kept[rows], right(matrix[rows], margins.label[rows], point.each[one]))


def test_held_out_images_do_not_affect_their_biases() -> None:
    """Replacing the margins of one fold changes neither the biases for this fold nor its held-out accuracies."""
    margins = table(UNEVEN, 40)
    first = fit(margins, rule="worst", seed=2)
    own = assigned(margins.label, FOLDS, 2) == 3
    others = margins.attacked.copy()
    margins.attacked[own] = np.where(np.isinf(others[own]), np.inf, np.abs(others[own]) + 2)
    second = fit(margins, rule="worst", seed=2)
    for before, after in zip(first.points, second.points, strict=True):
        np.testing.assert_array_equal(before.each[3], after.each[3])
        assert (before.each[1] != after.each[1]).any()


# -- rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_fit_raises_the_worst_class(rule: Any) -> None:
    margins = table(UNEVEN, 150)
    found = fit(margins, rule=rule)
    assert found.weight in WEIGHTS
    assert [point.weight for point in found.points] == list(WEIGHTS)
    assert abs(found.biases.mean()) < 1e-9
    assert found.biases.argmax() == 0
    counted = ClassAccuracy.of(margins.attacked, margins.label, bandwidth=0)
    assert counted.values(found.biases).min() > counted.values(np.zeros(4)).min() + 0.1
    objective = Objective(weak="tenth" if rule == "tenth" else "worst")
    expected = best(ClassAccuracy.of(margins.attacked, margins.label), found.weight, None, objective)
    np.testing.assert_allclose(found.biases, expected, atol=0.01)


@pytest.mark.parametrize("rule", ["worst", "tenth"])
def test_a_rule_takes_the_largest_held_out_value(rule: Any) -> None:
    margins = table(list(np.linspace(0.0, 1.4, 12)), 40)
    found = fit(margins, rule=rule)
    values = [getattr(point.held_out, rule) for point in found.points]
    assert found.weight == WEIGHTS[int(np.argmax(values))]
    assert max(values) > getattr(found.start.held_out, rule)


def test_rho_takes_the_highest_average_among_the_nearly_best() -> None:
    margins = table(UNEVEN, 100)
    found = fit(margins, rule="rho")
    start = found.start.held_out

    def rho(point: Any) -> float:
        return point.held_out.worst / start.worst + point.held_out.average / start.average - 2

    chosen = next(point for point in found.points if point.weight == found.weight)
    top = max(found.points, key=rho)
    assert rho(chosen) > 0
    assert chosen.held_out.average >= top.held_out.average
    assert chosen.weight <= top.weight
    # A standard error of rho is not more than that of the two worst classes it is made of.
    error = 2 * np.sqrt(top.held_out.worst * (1 - top.held_out.worst) / 100) / start.worst
    assert rho(top) - rho(chosen) <= error


@pytest.mark.parametrize("rule", RULES)
def test_identical_classes_get_no_biases(rule: Any) -> None:
    """Class c has the margins of class 0 over the classes that follow it, in a circle."""
    random, num_classes, each = np.random.default_rng(0), 5, 40
    block = random.normal(0.8, 1, (each, 1)) + random.exponential(0.7, (each, num_classes))
    block[:, 0] = np.inf
    attacked = np.concatenate([np.roll(block, one, axis=1) for one in range(num_classes)]).astype(np.float32)
    label = np.repeat(np.arange(num_classes), each)
    natural = np.where(np.isinf(attacked), 0, -attacked)
    found = fit(
        Margins(index=np.arange(len(label)), label=label, natural=natural, attacked=attacked, info={}), rule=rule
    )
    assert np.abs(found.biases).max() < 0.15
    if not found.weight:
        assert not found.biases.any()


def test_start_point_is_the_unchanged_model() -> None:
    margins = table(UNEVEN, 60)
    start = fit(margins).start
    values = ClassAccuracy.of(margins.attacked, margins.label).values(np.zeros(4))
    assert start.weight == 0
    assert not start.biases.any()
    assert start.fitted == start.held_out == Summary(average=values.mean(), worst=values.min(), tenth=values.min())


# -- floors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [0.64, 0.67, 0.7])
def test_floor_selects_the_smallest_sufficient_weight(floor: float) -> None:
    margins = table(UNEVEN, 150)
    found = fit(margins, floor=floor, seed=3)
    assert found.start.held_out.worst < floor
    assert found.weight > 0
    reached = held_out_by_hand(margins, found.weight, seed=3)
    assert reached.worst >= floor - 0.002
    assert all(point.held_out.worst < floor for point in found.points if point.weight < found.weight / 1.0001)
    step = (WEIGHTS[1] / WEIGHTS[0]) ** (1 / 32)  # five halvings between two points
    if found.weight > WEIGHTS[0]:
        assert held_out_by_hand(margins, found.weight / step / 1.0001, seed=3).worst < floor + 0.002
    assert found.held_out_robust[margins.label == 0].mean() == pytest.approx(reached.worst, abs=0.06)


def test_higher_floors_select_larger_weights() -> None:
    margins = table(UNEVEN, 150)
    found = [fit(margins, floor=floor) for floor in (0.65, 0.68, 0.71)]
    assert all(before.weight < after.weight for before, after in pairwise(found))
    assert all(before.biases[0] < after.biases[0] for before, after in pairwise(found))


def test_floor_that_is_already_reached_changes_nothing() -> None:
    margins = table(UNEVEN, 60)
    found = fit(margins, floor=0.2)
    assert found.start.held_out.worst > 0.2
    assert found.weight == 0
    assert found.biases.tolist() == [0.0] * 4
    np.testing.assert_array_equal(found.held_out_robust, right(margins.attacked, margins.label, np.zeros(4)))
    np.testing.assert_array_equal(found.held_out_natural, margins.natural.argmax(axis=1) == margins.label)


def test_unreachable_floor_names_the_highest_value() -> None:
    margins = table(UNEVEN, 60)
    with pytest.raises(InputError) as caught:
        fit(margins, floor=0.99)
    points = fit(margins).points
    top = max(points, key=lambda point: point.held_out.worst).held_out
    assert str(caught.value) == (
        f"a floor of 99% is not reachable by class biases: the highest worst class is {100 * top.worst:.1f}%, with an "
        f"average of {100 * top.average:.1f}% (cross-validated); pass a lower floor"
    )
    fit(margins, floor=top.worst - 1e-3)


def test_a_worst_class_that_biases_cannot_raise() -> None:
    margins = table([-8.0, 1.2, 1.2, 1.2], 40)
    with pytest.raises(InputError) as caught:
        fit(margins, floor=0.5)
    assert str(caught.value) == "class biases cannot raise the worst class of this model above 0%"


# -- what is refused --------------------------------------------------------------------------------------


def refused(margins: Margins, **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        fit(margins, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_too_few_images_are_refused() -> None:
    said = refused(table(UNEVEN, [30, 30, LEAST - 1, 30]))
    assert said.startswith(f"class 2 has {LEAST - 1} fitting images: at least {LEAST} of each class are required")
    assert fit(table(UNEVEN, LEAST)).biases.shape == (4,)


def test_single_class_is_refused() -> None:
    margins = table(UNEVEN, [40, 0, 0, 0])
    assert "images of at least 2 classes, got 1" in refused(margins)
    assert "images of at least 2 classes, got 0" in refused(margins.take(np.arange(0)))


def test_a_class_without_images_keeps_its_bias() -> None:
    found = fit(table([0.0, 0.9, 0.2, 1.4], [80, 80, 0, 80]), rule="worst")
    assert found.weight > 0
    assert found.biases[2] == 0
    assert np.isfinite(found.biases).all()
    assert np.isfinite([point.held_out.average for point in found.points]).all()


def test_invalid_rules_and_floors_are_refused() -> None:
    margins = table(UNEVEN, 20)
    assert "did you mean 'worst'" in refused(margins, rule="wurst")
    for floor in (0.0, -0.1, 1.0, 32.0, float("nan")):
        assert "floor must be a fraction between 0 and 1" in refused(margins, floor=floor)


# -- folds, and the same again ----------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 23), min_size=1, max_size=6), folds=st.integers(2, 7), seed=st.integers(0, 99))
def test_every_class_is_divided_evenly_into_folds(counts: list[int], folds: int, seed: int) -> None:
    label = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    fold = assigned(label, folds, seed)
    assert fold.shape == label.shape
    for one, count in enumerate(counts):
        sizes = np.bincount(fold[label == one], minlength=folds)
        assert len(sizes) == folds
        assert sizes.sum() == count
        assert sizes.max() - sizes.min() <= 1
    np.testing.assert_array_equal(fold, assigned(label, folds, seed))


def test_the_folds_are_random() -> None:
    label = np.repeat(np.arange(3), 40)
    first, second = assigned(label, 5, 0), assigned(label, 5, 1)
    assert (first != second).any()
    assert (first[:40] != first[40:80]).any()


def test_fit_is_deterministic() -> None:
    margins = table(UNEVEN, 40)
    first, second, other = fit(margins), fit(margins), fit(margins, seed=1)
    assert first.biases.tolist() == second.biases.tolist()
    assert first.weight == second.weight
    assert [point.held_out for point in first.points] == [point.held_out for point in second.points]
    np.testing.assert_array_equal(first.held_out_robust, second.held_out_robust)
    # Another seed makes other folds, and the fit to all images stays the same.
    assert [point.held_out for point in first.points] != [point.held_out for point in other.points]
    assert [point.fitted for point in first.points] == [point.fitted for point in other.points]


def test_summaries() -> None:
    found = Summary.of(np.array([0.5, np.nan, 0.1, *[0.9] * 10]), np.array([30, 0, *[10] * 11]))
    assert found.average == pytest.approx((30 * 0.5 + 10 * 0.1 + 100 * 0.9) / 140)
    assert found.worst == 0.1
    assert found.tenth == pytest.approx((0.1 + 0.5) / 2)  # a tenth of twelve classes is two classes
