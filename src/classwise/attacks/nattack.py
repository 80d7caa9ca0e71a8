"""NAttack (Li et al., ICML 2019): search for a Gaussian distribution whose samples are misclassified.

With w the mean of the Gaussian in tanh space, population member i is x'_i = P((tanh(w + sigma * z_i) + 1) / 2) with
standard normal z_i, and its reward is r_i = -max(log p_y - max_{k != y} log p_k, 0) / 2 (Algorithm 1). An iteration
adds learning_rate / (population * sigma) * sum_i A_i z_i to w, where A are the standardized rewards: an estimate of the
natural gradient of the expected reward.

``sigma`` and ``learning_rate`` are in tanh space, whatever the radius. There a pixel that is exactly black or white
lies seven units from gray and hardly moves, so the attack is weak on images such as MNIST.

Deviations
* The mean is tested before every iteration, with one more query; the authors test it every tenth iteration.
* ``reward=first-member`` reproduces the authors' code, which uses the best wrong class of the first member for all
  (``max(1)[0]`` of a numpy array is its first entry). ``margin`` is the paper's.
* The ball is around the image; in the authors' code, around the image moved towards gray by 1e-6 to keep atanh finite.
"""

# B batch, Q population members, K classes

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from classwise.attacks.estimation import EstimationAttack, Population, State, query
from classwise.attacks.losses import margin
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count, Positive


@dataclass(frozen=True, kw_only=True)
class NAttack(EstimationAttack):
    """NAttack (Li et al. 2019): score-based search for a Gaussian distribution of adversarial images."""

    iterations: Count = 500
    population: Population = 300
    sigma: Positive = 0.1
    """Standard deviation of the Gaussian, in tanh space."""
    learning_rate: Positive = 0.02
    """Step size of the mean, in tanh space."""
    reward: Literal["margin", "first-member"] = "margin"
    """Reward of a member; ``first-member`` is that of the authors' code."""

    def begin(self, problem: Problem) -> State:
        center = problem.ball.center
        return (torch.atanh((2 * center - 1) * (1 - 1e-6)) + 0.001 * problem.noise.normal(center),)

    def image(self, problem: Problem, state: State) -> Tensor:
        (w,) = state
        return problem.ball.project((w.tanh() + 1) / 2)

    def step(self, problem: Problem, state: State, iteration: int) -> State:
        (w,) = state
        z = problem.noise.normal(w[:, None].expand(-1, self.population, -1, -1, -1))
        repeated = torch.arange(len(w), device=w.device).repeat_interleave(self.population)
        members = problem.ball.take(repeated).project((((w[:, None] + self.sigma * z).tanh() + 1) / 2).flatten(0, 1))
        logits = query(problem, members.view_as(z))
        rewards = rewards_of(logits, problem.y, self.reward).to(w.dtype)
        spread, mean = torch.std_mean(rewards, 1, correction=0, keepdim=True)
        advantage = (rewards - mean) / (spread + 1e-7)
        scale = self.learning_rate / (self.population * self.sigma)
        return (w + scale * torch.einsum("bq,bqchw->bchw", advantage, z),)


def rewards_of(logits: Tensor, y: Tensor, kind: Literal["margin", "first-member"]) -> Tensor:
    """Return the rewards (B, Q) of population members with these logits (B, Q, K)."""
    if kind == "margin":  # a difference of log-probabilities is a difference of logits
        lead = -margin(y.repeat_interleave(logits.shape[1]))(logits.flatten(0, 1)).view(logits.shape[:2])
    else:
        log_p = logits.log_softmax(2)
        label = y[:, None, None].expand(-1, logits.shape[1], 1)
        runner_up = log_p.scatter(2, label, -torch.inf).amax(2)[:, :1]
        lead = log_p.gather(2, label).squeeze(2) - runner_up
    return -lead.clamp_min(0) / 2
