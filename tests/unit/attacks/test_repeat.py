"""Repeated steps of a search: passes are counted whether Python or a captured graph runs the steps."""

# B batch

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.attacks.losses import margin
from classwise.attacks.problem import PassCounter, Problem
from classwise.core.model_calls import State, Step
from classwise.core.types import AttackCall


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    return (
        PGD(eps=0.1)
        .problem(AttackCall(model, torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])))
        .take(torch.tensor([1, 3]))
    )


def climb(problem: Problem) -> Step:
    def step(x: Tensor) -> State:
        gradient, _, _ = problem.gradient(x, margin(problem.y))
        problem.logits(x)
        return (problem.ball.step(x, gradient, 0.01),)

    return step


@pytest.mark.parametrize("times", [0, 1, 2, 7])
@pytest.mark.parametrize("twice", [False, True])
def test_passes_of_repeated_steps_are_counted(problem: Problem, times: int, twice: bool) -> None:
    """An optimized copy may run steps without Python, or run some of them twice while recording."""

    def unseen(step: Step, state: State, times: int) -> State:
        if twice:
            step(*state)
        aside = replace(problem, counter=PassCounter(4, "cpu"))
        for _ in range(times):
            state = climb(aside)(*state)
        return state

    start = (problem.ball.center,)
    (plain,) = problem.repeat(climb(problem), start, times)
    expected = problem.counter.effort
    assert expected.forwards.tolist() == [0, 2 * times, 0, 2 * times]
    other = replace(problem, repeat_steps=unseen, counter=PassCounter(4, "cpu"))
    (found,) = other.repeat(climb(other), start, times)
    assert torch.equal(found, plain)
    assert torch.equal(other.counter.effort.forwards, expected.forwards)
    assert torch.equal(other.counter.effort.backwards, expected.backwards)
