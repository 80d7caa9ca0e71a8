"""SPSA (Uesato et al., ICML 2018): simultaneous perturbation, with Adam.

The gradient is estimated from the difference of the loss at x ± sigma v, for directions v of independent signs, and
Adam takes the projected step (Algorithm 1 there).

Adam moves every pixel about equally far, which suits Linf, the paper's norm; in L2 expect less than from NES.

Deviations
* The paper asks up to thousands of queries a step; the default here is 256.
"""

# B batch, Q queries an example

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from classwise.attacks.estimation import LOSSES, EstimatedLoss, EstimationAttack, State, antithetic, check_pairs
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.threat import Start

DECAY, DECAY_SQUARES = 0.9, 0.999
"""Adam's moving averages of the gradient and of its square, at their usual values."""


@dataclass(frozen=True, kw_only=True)
class SPSA(EstimationAttack):
    """Adam with gradients from random signs."""

    iterations: int = 100
    population: int = 256
    sigma: Number = 0.01
    step_size: Number = 0.01
    """Adam's learning rate: a pixel moves about so far in one step."""
    loss: EstimatedLoss = "margin"
    start: Start = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pairs(self, self.sigma)
        if self.step_size <= 0:
            raise InputError(f"step_size must be positive, got {self.step_size}")

    def begin(self, problem: Problem) -> State:
        x = problem.ball.start(self.start, problem.noise)
        return x, torch.zeros_like(x), torch.zeros_like(x)

    def image(self, problem: Problem, state: State) -> Tensor:
        return state[0]

    def step(self, problem: Problem, state: State, iteration: int) -> State:
        x, mean, square = state
        draw = problem.noise.uniform(x[:, None].expand(-1, self.population // 2, -1, -1, -1))
        gradient = antithetic(problem, x, torch.where(draw < 0.5, 1, -1).to(x), self.sigma, LOSSES[self.loss])
        mean = DECAY * mean + (1 - DECAY) * gradient
        square = DECAY_SQUARES * square + (1 - DECAY_SQUARES) * gradient.square()
        # Both averages start from zero: dividing by what has been added up so far removes that.
        direction = mean / (1 - DECAY ** (iteration + 1))
        size = (square / (1 - DECAY_SQUARES ** (iteration + 1))).sqrt()
        x = x + self.step_size * problem.ball.stretch * direction / (size + 1e-8)
        return problem.ball.project(x), mean, square
