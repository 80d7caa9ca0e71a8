"""SPSA (Uesato et al., ICML 2018): simultaneous perturbation stochastic approximation, with Adam.

The gradient is estimated from differences of the loss at x + sigma * v and x - sigma * v, with directions v of
independent random signs; Adam takes the step, which is projected (Algorithm 1).

Adam moves all pixels about equally far, which suits Linf, the norm of the paper. In L2 it is weaker than NES.

Deviations
* The paper takes up to thousands of queries per step; the default here is 256.
"""

# B batch, Q queries per example

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from classwise.attacks.estimation import LOSSES, EstimatedLoss, EstimationAttack, Pairs, State, antithetic
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count, Positive
from classwise.core.threat import Start

DECAY, DECAY_SQUARES = 0.9, 0.999
"""Decay rates of Adam's averages of the gradient and of its square."""


@dataclass(frozen=True, kw_only=True)
class SPSA(EstimationAttack):
    """SPSA (Uesato et al. 2018): Adam with gradients estimated from queries in directions of random signs."""

    iterations: Count = 100
    population: Pairs = 256
    sigma: Positive = 0.01
    """Distance of the queries from the image."""
    step_size: Positive = 0.01
    """Learning rate of Adam, about the change of a pixel in one step."""
    loss: EstimatedLoss = "margin"
    start: Start = "zero"

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
        # Bias correction of averages that start at zero.
        direction = mean / (1 - DECAY ** (iteration + 1))
        size = (square / (1 - DECAY_SQUARES ** (iteration + 1))).sqrt()
        x = x + self.step_size * problem.ball.stretch * direction / (size + 1e-8)
        return problem.ball.project(x), mean, square
