"""BAT, balance adversarial training (Sun et al. 2022, arXiv 2209.07534).

On the way of PGD from x outwards lie two points: x_lc, the last that is still classified correctly, and x_fa, tau
steps after the first that is not. Neither too easy nor too hard,

L = CE(f(x_lc), y) + KL(p(x_lc) ‖ U) + KL(p(x_fa) ‖ U) + beta · KL(p(x) ‖ p(x_fa)), with U uniform over the classes.

Of the loss terms, ``adv`` is the divergence after beta and ``nat`` the three before it: a policy that turns
``weight_nat`` weights losses of attacked images.

Deviations
* One walk gives both points of an example. The authors walk twice and leave the points in another order, so that the
  two of one loss belong to different examples; here they belong together.
* An example that starts misclassified has its start as x_lc; one that never is has the end as both.
* Three training passes, one for each point: batch norm sees x, x_lc and x_fa as batches of their own.
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
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both, frozen, logits_of
from classwise.core.streams import Randomness
from classwise.core.types import ClassControls, LossTerms, Objective


@dataclass(frozen=True, kw_only=True)
class BAT(Objective):
    """Trains on two points of the attack's way: just before and just after the decision boundary.

    Batch-norm statistics see the clean batch, the points before and the points after, in this order.
    """

    paper: ClassVar[str] = "Sun et al. 2022"

    beta: Number = 6.0
    tau: int = 1
    """Steps from the first misclassified point to x_fa."""
    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise InputError(f"beta must not be negative, got {self.beta}")
        if self.tau < 0:
            raise InputError(f"tau counts steps from 0, got {self.tau}")
        if self.attack.restarts != 1 or self.attack.target is not None:
            raise InputError("bat walks once, away from the label: it takes no restarts and no target")

    def perturb(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> Tensor:
        """(2B, ...): all x_lc, then all x_fa."""
        if controls.targets is not None:
            raise InputError("bat walks away from the label: it goes with no policy that aims at classes")
        problem = self.attack.pose(model, x, y, eps_scale=controls.eps_scale[y], generator=generator)
        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            return torch.cat(self._walk(problem)).detach().to(x.device)

    def _walk(self, problem: Problem) -> tuple[Tensor, Tensor]:
        attack, ball = self.attack, problem.ball
        size = attack.step_size if attack.step_size is not None else 2.5 * attack.threat.eps / attack.steps
        loss = make_loss(attack.loss, problem)
        x = before = after = ball.start(attack.start, problem.noise)
        safe = torch.ones_like(problem.y, dtype=torch.bool)  # not misclassified so far
        late = torch.zeros_like(problem.y)  # steps since the first misclassification
        for _ in range(attack.steps):
            gradient, _, logits = problem.gradient(x, loss)
            safe = safe & (logits.argmax(1) == problem.y)
            before = torch.where(_by_image(safe, x), x, before)
            x = ball.step(x, gradient, size)
            after = torch.where(_by_image(safe | (late < self.tau), x), x, after)
            late = late + ~safe
        return torch.where(_by_image(safe & problem.survives(x), x), x, before), after

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        before, after = x_adv.chunk(2)
        # The pair goes first: until its gradient is taken, a plain pass holds the statistics that a pair would change.
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
    """KL(p ‖ U) = Σ p log p + log K."""
    log_p = logits.log_softmax(1)
    return (log_p.exp() * log_p).sum(1) + math.log(logits.shape[1])


def _by_image(flags: Tensor, x: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (x.dim() - 1))
