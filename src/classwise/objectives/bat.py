"""BAT, balance adversarial training (Sun et al. 2022, arXiv 2209.07534).

On the path of PGD from x there are two points: x_lc, the last that is still classified correctly, and x_fa, tau steps
after the first that is not. With U the uniform distribution over the classes,

    L = CE(f(x_lc), y) + KL(p(x_lc) || U) + KL(p(x_fa) || U) + beta * KL(p(x) || p(x_fa)).

The loss term ``adv`` is the last divergence, without beta, and ``nat`` is the sum of the other three terms. A policy
that sets ``weight_nat`` therefore weights losses of adversarial images.

Deviations
* One run of PGD gives both points of an example. The authors run it twice and return the points in different orders, so
  that the two points in one loss belong to different examples; here they belong together.
* If the starting point is misclassified, it is x_lc. If no point is misclassified, both x_lc and x_fa are the last
  point.
* Three passes in training mode, one for each point: batch norm normalizes x, x_lc and x_fa separately.
"""

# B batch, K classes

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.attacks.losses import divergence, make_loss
from classwise.attacks.problem import Problem, per_pixel
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both, logits_of
from classwise.core.streams import Randomness
from classwise.core.types import AttackCall, ClassControls, LossTerms, Objective


@dataclass(frozen=True, kw_only=True)
class BAT(Objective):
    """Balance adversarial training on the last attack point before and the first after the decision boundary.

    Batch-norm statistics are updated by three passes: natural images, points before, points after.
    """

    paper: ClassVar[str] = "Sun et al. 2022"

    beta: Number = 6.0
    tau: int = 1
    """Number of steps from the first misclassified point to x_fa."""
    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise InputError(f"beta must not be negative, got {self.beta}")
        if self.tau < 0:
            raise InputError(f"tau must not be negative, got {self.tau}")
        if self.attack.restarts != 1 or self.attack.target is not None:
            raise InputError("objective 'bat' needs an untargeted attack without restarts")

    def perturb(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> Tensor:
        """Return images (2B, C, H, W): first all x_lc, then all x_fa."""
        if controls.targets is not None:
            raise InputError("objective 'bat' does not support policies that set targets")
        with self.attack.searching(AttackCall.under(controls, model, x, y, generator)) as problem:
            return torch.cat(self._points(problem)).detach().to(x.device)

    def _points(self, problem: Problem) -> tuple[Tensor, Tensor]:
        attack, ball = self.attack, problem.ball
        loss = make_loss(attack.loss, problem)
        x = before = after = ball.start(attack.start, problem.noise)
        safe = torch.ones_like(problem.y, dtype=torch.bool)  # not misclassified so far
        late = torch.zeros_like(problem.y)  # steps since the first misclassification
        for _ in range(attack.steps):
            gradient, _, logits = problem.gradient(x, loss)
            safe = safe & (logits.argmax(1) == problem.y)
            before = torch.where(per_pixel(safe, x), x, before)
            x = ball.step(x, gradient, attack.step_length)
            after = torch.where(per_pixel(safe | (late < self.tau), x), x, after)
            late = late + ~safe
        return torch.where(per_pixel(safe & problem.survives(x), x), x, before), after

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        before, after = x_adv.chunk(2)
        # The pair goes first: a later pair would change statistics that the gradient of a plain pass still needs.
        logits_nat, logits_before = both(model, x, before)
        logits_after = logits_of(model(after))
        correct = F.cross_entropy(logits_before, y, reduction="none")
        return LossTerms(
            nat=correct + _from_uniform(logits_before) + _from_uniform(logits_after),
            adv=divergence(logits_nat)(logits_after),
            beta=self.beta,
            logits_nat=logits_nat,
            logits_adv=logits_after,
        )


def _from_uniform(logits: Tensor) -> Tensor:
    """Return KL(p || U) = sum_k p_k log p_k + log K."""
    log_p = logits.log_softmax(1)
    return (log_p.exp() * log_p).sum(1) + math.log(logits.shape[1])
