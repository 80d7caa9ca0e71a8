"""The frontier against exhaustive search, other solvers, and symmetry."""

# N examples, K classes

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad, minimize

from classwise.repairs.accuracy import ClassAccuracy, tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, Weak, _simplex, best, frontier
from each import for_each

PLAIN = Objective(penalty=0, softness=0)
SMOOTH = Objective(penalty=0, softness=0.5)
WEAK: tuple[Weak, ...] = ("worst", "tenth")


def problem(levels: list[float], each: int, seed: int = 0) -> ClassAccuracy:
    """Classes whose margins are normal around these levels."""
    random = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(levels)), each)
    shared = random.normal(np.array(levels)[label], 1)[:, None]
    return ClassAccuracy.of(shared + random.exponential(0.7, (len(label), len(levels))), label)


# -- the weak value ---------------------------------------------------------------------------------------


def capped(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[np.ndarray, float]]:
    """A vector, and a largest entry that lets entries sum to one."""
    return sizes.flatmap(
        lambda size: st.tuples(
            st.lists(st.floats(-3, 3), min_size=size, max_size=size).map(np.array), st.floats(1 / size, 1.0)
        )
    )


@settings(max_examples=60, deadline=None)
@given(capped(st.integers(2, 7)))
def test_the_nearest_point_of_a_capped_simplex(given: tuple[np.ndarray, float]) -> None:
    values, most = given
    found = _simplex(values, most)
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert found.min() >= 0
    assert found.max() <= most
    solved = minimize(
        lambda w: 0.5 * ((w - values) ** 2).sum(),
        np.full(len(values), 1 / len(values)),
        jac=lambda w: w - values,
        bounds=[(0, most)] * len(values),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones_like(w)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    distance = ((found - values) ** 2).sum()
    assert distance <= ((np.clip(solved.x, 0, most) - values) ** 2).sum() + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9).map(np.array))
def test_the_nearest_point_of_a_simplex_by_sorting(values: np.ndarray) -> None:
    """Without a cap: the algorithm of Held, Wolfe & Crowder (1974)."""
    falling = np.sort(values)[::-1]
    shifts = (np.cumsum(falling) - 1) / np.arange(1, len(values) + 1)
    shift = shifts[np.flatnonzero(falling > shifts)[-1]]
    np.testing.assert_allclose(_simplex(values, 1.0), np.maximum(values - shift, 0), atol=1e-9)


@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize("num_classes", [3, 10, 43])
def test_without_softness_the_weak_value_is_the_weakest(weak: Weak, num_classes: int) -> None:
    values = np.random.default_rng(num_classes).uniform(0, 1, num_classes)
    lowest = 1 if weak == "worst" else tenth_of(num_classes)
    expected = np.sort(values)[:lowest].mean()
    value, weights = Objective(weak=weak).tail(values, 0.0)
    assert value == pytest.approx(expected)
    assert weights @ values == pytest.approx(expected)
    nearly, _ = Objective(weak=weak).tail(values, 1e-6)
    assert nearly == pytest.approx(expected, abs=1e-5)
    # Very soft: all classes count equally.
    _, weights = Objective(weak=weak).tail(values, 1e6)
    np.testing.assert_allclose(weights, 1 / num_classes, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(weak=st.sampled_from(WEAK), soft=st.floats(0.02, 2), num_classes=st.integers(2, 30), seed=st.integers(0, 10**6))
def test_the_weights_are_the_gradient_of_the_weak_value(weak: Weak, soft: float, num_classes: int, seed: int) -> None:
    objective = Objective(weak=weak)
    values = np.random.default_rng(seed).uniform(0, 1, num_classes)
    error = check_grad(lambda a: objective.tail(a, soft)[0], lambda a: objective.tail(a, soft)[1], values, epsilon=1e-6)
    assert error < 1e-4
    lowered = values - 0.1 * np.eye(num_classes)[values.argmin()]
    assert objective.tail(lowered, soft)[0] < objective.tail(values, soft)[0]


# -- the optimum ------------------------------------------------------------------------------------------


def gained(accuracy: ClassAccuracy, biases: np.ndarray, weight: float) -> float:
    """Return the objective of a point without regularization, over the classes with examples."""
    values = accuracy.values(biases)
    present = values[~np.isnan(values)]
    return (present.mean() + weight * present.min()) / (1 + weight)


@for_each("weight", [0.05, 0.3, 1.0, 3.0, 20.0])
@for_each("objective", [PLAIN, Objective(penalty=0, softness=0.02)], ids=["hard", "soft"])
def test_three_classes_against_a_grid(weight: float, objective: Objective) -> None:
    accuracy = problem([0.2, 0.9, 1.4], 300)
    ticks = np.linspace(-1.2, 1.2, 49)
    grid = max(gained(accuracy, np.array([a, b, 0.0]), weight) for a in ticks for b in ticks)
    found = best(accuracy, weight, None, objective)
    assert abs(found.mean()) < 1e-9
    assert gained(accuracy, found, weight) >= grid - 0.002
    assert gained(accuracy, found, weight) >= gained(accuracy, np.zeros(3), weight)


@pytest.mark.parametrize("weight", [0.05, 1.0, 20.0])
def test_two_classes_against_a_line(weight: float) -> None:
    accuracy = problem([0.1, 1.3], 200, seed=3)
    line = max(gained(accuracy, np.array([a, 0.0]), weight) for a in np.linspace(-2, 2, 801))
    assert gained(accuracy, best(accuracy, weight, None, PLAIN), weight) >= line - 0.002


def test_penalty_and_softness_against_a_grid() -> None:
    """Compute the full objective, with penalty and softness, in two ways."""
    accuracy, weight, each = problem([0.2, 0.9, 1.4], 100), 3.0, 100
    level = accuracy.values(np.zeros(3)).min()
    soft = 8 * np.sqrt(level * (1 - level) / each)

    def value(biases: np.ndarray) -> float:
        values = accuracy.values(biases)
        inner = minimize(  # min over w on the simplex of w @ A + r / 2 |w|^2
            lambda w: w @ values + soft / 2 * w @ w,
            np.full(3, 1 / 3),
            bounds=[(0, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            method="SLSQP",
        ).fun
        scaled = (biases - biases.mean()) / np.median(accuracy.spread)
        return values.mean() + weight * inner - 0.5 * 20 / each * (10 / 3) * scaled @ scaled  # for K = 3

    ticks = np.linspace(-0.8, 0.8, 17)
    grid = max(value(np.array([a, b, 0.0])) for a in ticks for b in ticks)
    assert value(best(accuracy, weight, None, Objective(penalty=20, softness=8))) >= grid - 1e-4


def test_a_class_without_examples_keeps_its_bias() -> None:
    """Others lose to it as before: the optimum is that over the biases of the classes with examples."""
    random = np.random.default_rng(0)
    label = np.repeat([0, 1, 3], 300)
    margins = random.normal(np.array([0.3, 0.9, 0.0, 1.5])[label], 1)[:, None] + random.exponential(0.5, (900, 4))
    accuracy = ClassAccuracy.of(margins, label)
    found = best(accuracy, 3.0, None, PLAIN)
    assert found[2] == 0
    assert abs(found.mean()) < 1e-9
    ticks = np.linspace(-1, 1, 41)
    grid = max(gained(accuracy, np.array([a, b, 0.0, -a - b]), 3.0) for a in ticks for b in ticks)
    assert gained(accuracy, found, 3.0) >= grid - 0.002


@pytest.mark.parametrize("weak", WEAK)
def test_along_the_frontier_the_weak_value_rises_and_the_average_falls(weak: Weak) -> None:
    accuracy = problem(list(np.linspace(0.0, 1.6, 20)), 200)
    objective = Objective(weak=weak, penalty=0, softness=0.5)
    points = frontier(accuracy, WEIGHTS, objective)
    assert len(points) == len(WEIGHTS)
    values = [accuracy.values(biases) for biases in points]
    level = accuracy.values(np.zeros(20)).min()
    soft = 0.5 * np.sqrt(level * (1 - level) / 200)
    lifted = [objective.tail(value, soft)[0] for value in values]
    average = [value.mean() for value in values]
    assert all(after >= before - 1e-3 for before, after in pairwise(lifted))
    assert all(after <= before + 1e-3 for before, after in pairwise(average))
    assert lifted[-1] > lifted[0] + 0.05
    assert average[-1] < average[0]


def test_a_heavier_penalty_gives_smaller_biases() -> None:
    accuracy = problem([0.0, 0.8, 1.5, 1.0], 150)
    sizes = [np.abs(best(accuracy, 3.0, None, Objective(penalty=penalty))).max() for penalty in (0.0, 20.0, 500.0, 1e6)]
    assert all(after < before for before, after in pairwise(sizes))
    assert sizes[-1] < 1e-3


# -- symmetry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [Objective(), Objective(weak="tenth")], ids=WEAK)
def test_a_permutation_of_the_classes_permutes_the_biases(objective: Objective) -> None:
    levels = [0.1, 0.9, 1.4, 0.5, 1.1]
    random = np.random.default_rng(4)
    label = np.repeat(np.arange(5), 60)
    margins = random.normal(np.array(levels)[label], 1)[:, None] + random.exponential(0.7, (300, 5))
    order = np.array([3, 0, 4, 2, 1])  # the new name of each class
    renamed = np.empty_like(margins)
    renamed[:, order] = margins
    for weight in (0.3, 3.0):
        first = best(ClassAccuracy.of(margins, label), weight, None, objective)
        second = best(ClassAccuracy.of(renamed, order[label]), weight, None, objective)
        assert np.abs(first).max() > 0.05
        np.testing.assert_allclose(second[order], first, atol=2e-3)


def test_identical_classes_need_no_biases() -> None:
    """Class c has the margins of class 0 over the classes that follow it, in a circle."""
    random, num_classes, each = np.random.default_rng(0), 6, 80
    block = random.normal(0.8, 1, (each, 1)) + random.exponential(0.7, (each, num_classes))
    margins = np.concatenate([np.roll(block, one, axis=1) for one in range(num_classes)])
    accuracy = ClassAccuracy.of(margins, np.repeat(np.arange(num_classes), each))
    values = accuracy.values(np.zeros(num_classes))
    np.testing.assert_allclose(values, values[0], rtol=1e-12)
    for biases in frontier(accuracy, WEIGHTS[::5]):
        np.testing.assert_allclose(biases, 0, atol=2e-3)


def test_scaled_margins_scale_the_biases() -> None:
    random = np.random.default_rng(2)
    label = np.repeat(np.arange(4), 70)
    margins = random.normal(np.array([0.0, 0.6, 1.0, 1.4])[label], 1)[:, None] + random.exponential(0.7, (280, 4))
    first = best(ClassAccuracy.of(margins, label), 2.0)
    second = best(ClassAccuracy.of(1000 * margins, label), 2.0)
    np.testing.assert_allclose(second, 1000 * first, rtol=1e-3, atol=1)


# -- many classes -----------------------------------------------------------------------------------------


def many(num_classes: int, each: int, world: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes of different strength, each with three near neighbors."""
    random = np.random.default_rng([world, 0])
    level = random.normal(0.4, 0.6, num_classes)
    apart = random.exponential(2.0, (num_classes, num_classes))
    for one in range(num_classes):
        apart[one, random.permutation(num_classes)[:3]] = 0
    random = np.random.default_rng([world, 1, draw])
    label = np.repeat(np.arange(num_classes), each)
    shared = random.normal(level[label], 1)[:, None]
    margins = shared + apart[label] + random.normal(0, 0.4, (len(label), num_classes))
    margins[np.arange(len(label)), label] = np.inf
    return margins, label


def weakest_tenth(biases: np.ndarray, world: int, num_classes: int) -> float:
    """Accuracies on other examples of the same classes."""
    values = ClassAccuracy.of(*many(num_classes, 100, world, 1), bandwidth=0).values(biases)
    return float(np.sort(values)[: tenth_of(num_classes)].mean())


def test_objective_of_the_weakest_tenth() -> None:
    """With 100 classes of 10 examples each, the hard minimum overfits to the noise of single classes.

    With the default softness, both objectives depend on most classes and give almost equal biases, and both improve
    accuracy on other examples.
    """
    size, weight = 100, 20.0
    found: dict[str, list[float]] = {"none": [], "worst": [], "tenth": [], "soft worst": [], "soft tenth": []}
    for world in range(12):
        accuracy = ClassAccuracy.of(*many(size, 10, world, 0))
        found["none"].append(weakest_tenth(np.zeros(size), world, size))
        for weak in WEAK:
            hard, soft = Objective(weak=weak, softness=0), Objective(weak=weak)
            found[weak].append(weakest_tenth(best(accuracy, weight, None, hard), world, size))
            found[f"soft {weak}"].append(weakest_tenth(best(accuracy, weight, None, soft), world, size))
    mean = {name: np.mean(values) for name, values in found.items()}
    assert mean["tenth"] > mean["worst"] + 0.001
    assert mean["soft tenth"] > mean["none"]
    assert mean["soft worst"] > mean["none"]


def test_two_hundred_classes() -> None:
    accuracy = ClassAccuracy.of(*many(200, 10, 0, 0))
    for weak in WEAK:
        objective = Objective(weak=weak)
        points = frontier(accuracy, WEIGHTS[::7], objective)
        assert all(np.isfinite(biases).all() for biases in points)
        values = [np.sort(accuracy.values(biases))[:20].mean() for biases in (np.zeros(200), points[-1])]
        assert values[1] > values[0]
