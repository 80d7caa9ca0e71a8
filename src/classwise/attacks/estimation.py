"""Attacks that climb by an estimate of the gradient, made from many queries around one point."""

# B batch, Q queries an example, K classes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.problem import Problem
from classwise.core.errors import InputError

QUERIES_AT_ONCE = 4096
"""The most images in one forward pass, which bounds the memory whatever the batch and the population."""

State = tuple[Tensor, ...]
"""What a search remembers of each example: tensors whose first dimension is the batch."""


@dataclass(frozen=True, kw_only=True)
class EstimationAttack(BallAttack):
    """A search that asks ``population`` queries for every step. Its author writes the state, its image and one step.

    The image is tested before every step, for one query more, and a broken example leaves at once.
    """

    black_box: ClassVar[bool] = True

    iterations: int
    population: int
    """Queries an iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise InputError(f"iterations must be at least 1, got {self.iterations}")
        if self.population < 2:
            raise InputError(f"population must be at least 2, got {self.population}")

    @final
    def perturb(self, problem: Problem) -> Tensor:
        rows = torch.arange(len(problem), device=problem.y.device)
        groups = torch.split(rows, max(1, QUERIES_AT_ONCE // self.population))
        return torch.cat([self._climb(problem.take(group)) for group in groups])

    def _climb(self, problem: Problem) -> Tensor:
        result = problem.ball.centre.clone()
        rows = torch.arange(len(problem), device=result.device)
        state = self.begin(problem)
        for iteration in range(self.iterations):
            x = self.image(problem, state)
            result[rows] = x
            alive = problem.survives(x).nonzero().squeeze(1)
            if len(alive) < len(rows):
                rows, problem, state = rows[alive], problem.take(alive), tuple(part[alive] for part in state)
                if not len(rows):
                    return result
            state = self.step(problem, state, iteration)
        result[rows] = self.image(problem, state)
        return result

    @abstractmethod
    def begin(self, problem: Problem) -> State:
        """Where the search starts."""

    @abstractmethod
    def image(self, problem: Problem, state: State) -> Tensor:
        """The image (B, C, H, W) a state stands for, in the ball."""

    @abstractmethod
    def step(self, problem: Problem, state: State, iteration: int) -> State:
        """The next state, from ``population`` queries for each example."""


def ask(problem: Problem, x: Tensor) -> Tensor:
    """Logits (B, Q, K) of Q queries (B, Q, C, H, W) for every example."""
    # Where the queries are too many for one pass, the batch is a single example: see perturb.
    parts = [problem.logits(part.flatten(0, 1)) for part in torch.split(x, QUERIES_AT_ONCE, 1)]
    return torch.cat([part.view(len(problem), -1, part.shape[1]) for part in parts], 1)


def antithetic(problem: Problem, x: Tensor, directions: Tensor, sigma: float, loss: Callable[[Tensor], Loss]) -> Tensor:
    """The mean over directions u (B, Q, C, H, W) of (f(x + sigma u) - f(x - sigma u)) / (2 sigma) · u.

    Where the entries of u are independent with mean 0 and variance 1, its expectation is the gradient of a linear or
    quadratic loss; of any other it is the gradient up to a term in sigma². The pairs cancel the value f(x) itself.
    """
    away = sigma * directions
    logits = ask(problem, torch.cat([x[:, None] + away, x[:, None] - away], 1))
    values = loss(problem.y.repeat_interleave(logits.shape[1]))(logits.flatten(0, 1)).view(logits.shape[:2])
    forth, back = values.to(x.dtype).chunk(2, 1)
    return torch.einsum("bq,bqchw->bchw", (forth - back) / (2 * sigma * directions.shape[1]), directions)


EstimatedLoss = Literal["ce", "margin"]
LOSSES: dict[EstimatedLoss, Callable[[Tensor], Loss]] = {"ce": log_odds, "margin": margin}


def check_pairs(attack: EstimationAttack, sigma: float) -> None:
    """What attacks with antithetic pairs need of their settings."""
    if attack.population % 2:
        raise InputError(f"population must be even, as queries come in pairs, got {attack.population}")
    if sigma <= 0:
        raise InputError(f"sigma must be positive, got {sigma}")
