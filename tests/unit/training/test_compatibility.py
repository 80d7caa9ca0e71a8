"""What goes with what, and what it costs, against the papers' own count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from classwise.core.types import Objective
from classwise.objectives import OBJECTIVES, Free, HypersphereEmbedding, Madry, Similarity, Standard, Trades
from classwise.policies import POLICIES
from classwise.training.compatibility import conflict, nature_of

EVERY = [kind() for kind in OBJECTIVES.values()]


def steps(objective: Objective, number: int) -> Objective:
    return replace(objective, attack=replace(objective.attack, steps=number))  # type: ignore[type-var]


@pytest.mark.parametrize("number", [1, 7])
def test_passes_are_those_of_the_algorithms(number: int) -> None:
    """A forward pass counts one and a backward pass two. Madry: n attack steps and one training pass. TRADES: a clean
    pass for the attack, n steps, and two training passes."""
    assert nature_of(Standard()).cost == 3
    assert nature_of(steps(Madry(), number)).cost == 3 * number + 3
    assert nature_of(steps(Trades(), number)).cost == 1 + 3 * number + 6
    assert nature_of(Free(replays=number + 1)).cost == 3 * (number + 1)


def test_what_is_built_on_another_obeys_as_it_does() -> None:
    for base, kind in (("madry", Madry), ("trades", Trades)):
        for composed in (HypersphereEmbedding(base=base), Similarity(base=base)):
            assert nature_of(composed) == nature_of(kind())


def test_controls_that_make_a_difference() -> None:
    assert nature_of(Standard()).obeys == {"sampling", "weight_nat"}
    assert nature_of(Madry()).obeys == {"sampling", "weight_adv", "beta_scale", "eps_scale", "targets"}
    assert nature_of(Trades()).obeys == {"sampling", "weight_nat", "weight_adv", "beta_scale", "eps_scale"}
    assert "targets" in nature_of(replace(Trades(), attack=replace(Trades().attack, loss="ce"))).obeys


@pytest.mark.parametrize("objective", EVERY, ids=list(OBJECTIVES))
def test_plain_training_goes_with_everything(objective: Objective) -> None:
    assert conflict(POLICIES["uniform"], objective) is None
    assert conflict(POLICIES["wat"], objective) is None


def test_what_makes_no_sense_has_a_reason() -> None:
    assert conflict(POLICIES["beta-vector"], Standard()) == "it turns beta_scale, which makes no difference here"
    assert "needs a training attack" in str(conflict(POLICIES["faal"], Standard()))
    assert "does not support targets" in str(conflict(POLICIES["fair-tat"], Trades()))
    assert "the objective does not support targets" in str(conflict(POLICIES["targeted"], Free()))
