"""Compatibility of policies with objectives, and costs as counted in the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from classwise.core.types import Objective
from classwise.objectives import OBJECTIVES, Free, HypersphereEmbedding, Madry, Similarity, Standard, Trades
from classwise.policies import POLICIES
from classwise.training.compatibility import conflict, passes_per_image
from each import for_each

EVERY = [kind() for kind in OBJECTIVES.values()]


def steps(objective: Objective, number: int) -> Objective:
    return replace(objective, attack=replace(objective.attack, steps=number))  # type: ignore[type-var]


@pytest.mark.parametrize("number", [1, 7])
def test_cost_equals_passes_of_the_algorithms(number: int) -> None:
    """A forward pass counts one and a backward pass two. Madry: n attack steps and one training pass. TRADES: a clean
    pass for the attack, n steps, and two training passes."""
    assert passes_per_image(Standard()) == 3
    assert passes_per_image(steps(Madry(), number)) == 3 * number + 3
    assert passes_per_image(steps(Trades(), number)) == 1 + 3 * number + 6
    assert passes_per_image(Free(replays=number + 1)) == 3 * (number + 1)


def test_composed_objectives_have_traits_of_their_base() -> None:
    for base, kind in (("madry", Madry), ("trades", Trades)):
        for composed in (HypersphereEmbedding(base=base), Similarity(base=base)):
            assert passes_per_image(composed) == passes_per_image(kind())
            assert composed.used_controls == kind().used_controls


def test_controls_with_an_effect() -> None:
    assert Standard().used_controls == {"sampling", "weight_nat"}
    assert Madry().used_controls == {"sampling", "weight_adv", "beta_scale", "eps_scale", "targets"}
    assert Trades().used_controls == {"sampling", "weight_nat", "weight_adv", "beta_scale", "eps_scale"}
    assert "targets" in replace(Trades(), attack=replace(Trades().attack, loss="ce")).used_controls


@for_each("objective", EVERY, ids=list(OBJECTIVES))
def test_uniform_and_wat_work_on_every_objective(objective: Objective) -> None:
    assert conflict(POLICIES["uniform"], objective) is None
    assert conflict(POLICIES["wat"], objective) is None


def test_conflicts_have_a_reason() -> None:
    assert conflict(POLICIES["beta-vector"], Standard()) == "it sets beta_scale, which this objective does not use"
    assert conflict(POLICIES["absld"], Trades()) == (
        "it sets temperature_nat and temperature_adv, which this objective does not use"
    )
    assert "needs a training attack" in str(conflict(POLICIES["faal"], Standard()))
    assert "does not support targets: set loss to" in str(conflict(POLICIES["fair-tat"], Trades()))
    assert "own attack does not support targets" in str(conflict(POLICIES["targeted"], Free()))
