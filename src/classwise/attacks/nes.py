"""NES (Ilyas et al., ICML 2018): projected gradient ascent on a gradient estimated from queries.

The estimate is antithetic, 1 / (sigma * n) * sum_i u_i f(x + sigma * u_i) over Gaussian directions and their opposites
(Algorithm 1); each step is one of PGD.

Deviations
* The attack is untargeted, and "ce" is the log odds log((1 - p_y) / p_y), which do not saturate.
* No momentum and no learning rate schedule, which are in the authors' code but not in the paper.
"""

# B batch, Q queries per example

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.estimation import LOSSES, EstimatedLoss, EstimationAttack, Pairs, State, antithetic
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count, Positive
from classwise.core.threat import Start


@dataclass(frozen=True, kw_only=True)
class NES(EstimationAttack):
    """NES (Ilyas et al. 2018): PGD with gradients estimated from queries in Gaussian directions."""

    iterations: Count = 200
    population: Pairs = 50
    sigma: Positive = 0.001
    """Distance of the queries from the image."""
    step_size: Positive | None = None
    """Step size in the units of eps. Default: eps / 5, which is the authors' 0.01 for their 0.05."""
    loss: EstimatedLoss = "ce"
    start: Start = "zero"

    def begin(self, problem: Problem) -> State:
        return (problem.ball.start(self.start, problem.noise),)

    def image(self, problem: Problem, state: State) -> Tensor:
        return state[0]

    def step(self, problem: Problem, state: State, iteration: int) -> State:
        (x,) = state
        directions = problem.noise.normal(x[:, None].expand(-1, self.population // 2, -1, -1, -1))
        gradient = antithetic(problem, x, directions, self.sigma, LOSSES[self.loss])
        step_size = self.step_size if self.step_size is not None else self.threat.eps / 5
        return (problem.ball.step(x, gradient, step_size),)
