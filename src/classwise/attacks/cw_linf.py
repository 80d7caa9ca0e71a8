"""The Linf attack of Carlini & Wagner (2017, §V-C): minimise Σ (|δ_i| - τ)⁺ + c · f(x + δ), with a τ that falls.

The largest |δ_i| alone would be a poor thing to descend: its gradient sees one pixel. The sum sees every pixel above τ,
and τ is kept at 0.9 of the smallest perturbation found yet. c grows tenfold as often as ``search_steps`` says, each
time from the nearest point found so far. The defaults are those of Carmon et al. (2019), as Tian et al. (KDD 2021) ran
the attack.

Deviations, besides those of both attacks (``carlini_wagner.py``)
* τ falls within a descent, as soon as a nearer point fools the model; the paper ends the descent there and starts
  another. So ``steps`` bounds the work for each c, not for each c and τ.
* Within a ball τ never falls below the radius, as a smaller perturbation would gain nothing.
* c only grows, as in the paper, though by 10 and not by 2. Carmon et al. lower it again once anything is found,
  however far out; on digits, c = 0.01 and less ends 7 per cent further out.
"""

# B batch

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from classwise.attacks.carlini_wagner import CarliniWagner, Nearest
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.threat import Norm


@dataclass(frozen=True, kw_only=True)
class CWLinf(CarliniWagner):
    """Carlini & Wagner's search for the smallest Linf perturbation."""

    norms: ClassVar[tuple[Norm, ...]] = ("Linf",)
    instead: ClassVar[str] = "cw-l2"

    norm: Norm | None = "Linf"
    search_steps: int = 5
    steps: int = 1000
    learning_rate: Number = 0.005
    initial_c: Number = 0.01
    tau_decrease: Number = 0.9
    """τ relative to the smallest perturbation found yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tau_decrease < 1:
            raise InputError(f"tau_decrease must lie between 0 and 1, got {self.tau_decrease}")

    def minimise(self, problem: Problem, enough: Tensor) -> Nearest:
        nearest = Nearest(problem.ball.centre.clone(), torch.full_like(enough, torch.inf))
        for attempt in range(self.search_steps):
            c = torch.full_like(enough, self.initial_c * 10**attempt)
            self.descend(problem, c, nearest.x, nearest, enough)
        return nearest

    def size(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)

    def cost(self, delta: Tensor, nearest: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        tau = torch.maximum(self.tau_decrease * nearest, enough).clamp_max(1)
        excess = (delta.abs() - tau.view(-1, *[1] * (delta.dim() - 1))).clamp_min(0)
        return excess.flatten(1).sum(1), excess.sign() * delta.sign()
