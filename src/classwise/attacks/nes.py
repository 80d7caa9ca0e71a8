"""NES (Ilyas et al., ICML 2018): projected gradient ascent on a gradient estimated from queries.

The estimate is the antithetic one, 1 / (sigma n) · Σ u_i f(x + sigma u_i) over Gaussian directions that come with
their opposites (Algorithm 1 there), and each step is PGD's.

Deviations
* Away from the label rather than towards a class, and "ce" is log (1 - p_y) / p_y, which never goes flat.
* No momentum and no learning rate that falls on a plateau, which are in the authors' code and not in the paper.
"""

# B batch, Q queries an example

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.estimation import LOSSES, EstimatedLoss, EstimationAttack, State, antithetic, check_pairs
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.threat import Start


@dataclass(frozen=True, kw_only=True)
class NES(EstimationAttack):
    """PGD with gradients from Gaussian search directions."""

    iterations: int = 200
    population: int = 50
    sigma: Number = 0.001
    step_size: Number | None = None
    """In the units of eps; eps / 5 if not given, the authors' 0.01 for their 0.05."""
    loss: EstimatedLoss = "ce"
    start: Start = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pairs(self, self.sigma)
        if self.step_size is not None and self.step_size <= 0:
            raise InputError(f"step_size must be positive, got {self.step_size}")

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
