"""NAttack (Li et al., ICML 2019): search for a Gaussian whose draws the model gets wrong.

With w the mean of the Gaussian in tanh space, a member of the population is x'_i = Π((tanh(w + sigma z_i) + 1) / 2)
with z_i standard normal, and its reward is r_i = -max(log p_y - max_{k≠y} log p_k, 0) / 2 (Algorithm 1).
One iteration moves w by learning_rate / (population · sigma) · Σ A_i z_i, A being the rewards less their mean over
their standard deviation: an estimate of the natural gradient of the expected reward.

``sigma`` and ``learning_rate`` are in tanh space, whatever the radius. There a pixel that is exactly black or white
lies seven units from grey and hardly moves, so expect little on drawings such as MNIST.

Deviations
* The mean is tested before every iteration, for one query more; the authors test it every tenth.
* ``reward=first-member`` is what the authors' code computes: it takes the runner-up of the first member for all of
  them (``max(1)[0]`` of a numpy array is its first entry), which leaves log p_y and a constant. ``margin`` is the
  paper's.
* The ball is around the image itself; the code's is around the image pulled to grey by 1e-6, which keeps atanh finite.
"""

# B batch, Q members of the population, K classes

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from classwise.attacks.estimation import EstimationAttack, State, ask
from classwise.attacks.losses import margin
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class NAttack(EstimationAttack):
    """Natural evolution of a Gaussian in tanh space."""

    iterations: int = 500
    population: int = 300
    sigma: Number = 0.1
    learning_rate: Number = 0.02
    reward: Literal["margin", "first-member"] = "margin"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma <= 0:
            raise InputError(f"sigma must be positive, got {self.sigma}")
        if self.learning_rate <= 0:
            raise InputError(f"learning_rate must be positive, got {self.learning_rate}")

    def begin(self, problem: Problem) -> State:
        centre = problem.ball.centre
        return (torch.atanh((2 * centre - 1) * (1 - 1e-6)) + 0.001 * problem.noise.normal(centre),)

    def image(self, problem: Problem, state: State) -> Tensor:
        (w,) = state
        return problem.ball.project((w.tanh() + 1) / 2)

    def step(self, problem: Problem, state: State, iteration: int) -> State:
        (w,) = state
        z = problem.noise.normal(w[:, None].expand(-1, self.population, -1, -1, -1))
        repeated = torch.arange(len(w), device=w.device).repeat_interleave(self.population)
        members = problem.ball.take(repeated).project((((w[:, None] + self.sigma * z).tanh() + 1) / 2).flatten(0, 1))
        logits = ask(problem, members.view_as(z))
        rewards = rewards_of(logits, problem.y, self.reward).to(w.dtype)
        spread, mean = torch.std_mean(rewards, 1, correction=0, keepdim=True)
        advantage = (rewards - mean) / (spread + 1e-7)
        scale = self.learning_rate / (self.population * self.sigma)
        return (w + scale * torch.einsum("bq,bqchw->bchw", advantage, z),)


def rewards_of(logits: Tensor, y: Tensor, kind: Literal["margin", "first-member"]) -> Tensor:
    """Rewards (B, Q) of members with these logits (B, Q, K)."""
    if kind == "margin":  # a difference of log-probabilities is one of logits
        lead = -margin(y.repeat_interleave(logits.shape[1]))(logits.flatten(0, 1)).view(logits.shape[:2])
    else:
        log_p = logits.log_softmax(2)
        label = y[:, None, None].expand(-1, logits.shape[1], 1)
        runner_up = log_p.scatter(2, label, -torch.inf).amax(2)[:, :1]
        lead = log_p.gather(2, label).squeeze(2) - runner_up
    return -lead.clamp_min(0) / 2
