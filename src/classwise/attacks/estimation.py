"""The base of black-box attacks that estimate the gradient of a loss from queries around a point."""

# B batch, Q queries per example, K classes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count

QUERIES_AT_ONCE = 4096
"""Maximum number of images in one forward pass, which bounds the memory."""

Population = Annotated[int, Field(ge=2)]
"""A number of queries per iteration."""
Pairs = Annotated[int, Field(ge=2, multiple_of=2)]
"""A number of queries per iteration, which come in antithetic pairs."""

State = tuple[Tensor, ...]
"""The state of a search: tensors whose first dimension is the batch."""


@dataclass(frozen=True, kw_only=True)
class EstimationAttack(BallAttack):
    """A search that takes ``population`` queries per iteration. Subclasses implement its state, its image and one step.

    Before every iteration one more query tests the image; broken examples are finished.
    """

    black_box: ClassVar[bool] = True

    iterations: Count
    population: Population
    """Queries per iteration."""

    @final
    def perturb(self, problem: Problem) -> Tensor:
        rows = torch.arange(len(problem), device=problem.y.device)
        groups = torch.split(rows, max(1, QUERIES_AT_ONCE // self.population))
        return torch.cat([self._search(problem.take(group)) for group in groups])

    def _search(self, problem: Problem) -> Tensor:
        result = problem.ball.center.clone()
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
        """Return the initial state."""

    @abstractmethod
    def image(self, problem: Problem, state: State) -> Tensor:
        """Return the images (B, C, H, W) of a state, within the ball."""

    @abstractmethod
    def step(self, problem: Problem, state: State, iteration: int) -> State:
        """Return the next state, from ``population`` queries per example."""


def query(problem: Problem, x: Tensor) -> Tensor:
    """Return the logits (B, Q, K) of Q queries per example (B, Q, C, H, W)."""
    # If the queries of an example exceed one pass, the batch is a single example: see perturb.
    parts = [problem.logits(part.flatten(0, 1)) for part in torch.split(x, QUERIES_AT_ONCE, 1)]
    return torch.cat([part.view(len(problem), -1, part.shape[1]) for part in parts], 1)


def antithetic(problem: Problem, x: Tensor, directions: Tensor, sigma: float, loss: Callable[[Tensor], Loss]) -> Tensor:
    """Return the gradient estimate mean_u (f(x + sigma u) - f(x - sigma u)) / (2 sigma) * u, u (B, Q, C, H, W).

    If the entries of u are independent with mean 0 and variance 1, its expectation is the gradient, exactly for a
    linear or quadratic loss and up to a term in sigma^2 for others.
    """
    offsets = sigma * directions
    logits = query(problem, torch.cat([x[:, None] + offsets, x[:, None] - offsets], 1))
    values = loss(problem.y.repeat_interleave(logits.shape[1]))(logits.flatten(0, 1)).view(logits.shape[:2])
    plus, minus = values.to(x.dtype).chunk(2, 1)
    return torch.einsum("bq,bqchw->bchw", (plus - minus) / (2 * sigma * directions.shape[1]), directions)


EstimatedLoss = Literal["ce", "margin"]
LOSSES: dict[EstimatedLoss, Callable[[Tensor], Loss]] = {"ce": log_odds, "margin": margin}
