"""Robust soft-label adversarial distillation (Zi et al. 2021): a student learns a robust teacher's answers.

With q = softmax(T(x) / tau) the teacher's answer on the clean image and p the student's,

    (1 - beta) · KL(q ‖ p(x)) + beta · max KL(q ‖ p(x')),   beta = 5/6,

and labels are never looked at. tau is 1 in the paper; ABSLD (Zhao et al. 2024) gives every class temperatures of its
own, one for each term.

Deviations
* KL is summed over the classes; the authors' code takes the mean, which makes the loss K times smaller.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.attacks.losses import divergence
from classwise.attacks.pgd import climb
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both, frozen, logits_of
from classwise.core.streams import Randomness
from classwise.core.types import ClassControls, LossTerms, Objective


@dataclass(frozen=True, kw_only=True)
class RSLAD(Objective):
    """The distance from a teacher's answers. Batch-norm statistics see the clean, then the attacked batch."""

    paper: ClassVar[str] = "Zi et al. 2021"
    needs_teacher: ClassVar[bool] = True

    teacher: InstanceOf[nn.Module] | str | None = field(default=None, repr=False)
    """A model to learn from: a run directory or any other model spec."""
    beta: Number = 5 / 6
    """Strength of the adversarial term; the natural one has the rest of 1."""
    temperature: Number = 1.0
    """What the teacher's logits are divided by."""
    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")
    by_class: tuple[Tensor | None, Tensor | None] = field(default=(None, None), init=False, repr=False, compare=False)
    """(K,) temperatures relative to that one, for the natural and for the adversarial term, where classes differ."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise InputError(f"beta shares 1 between two terms: expected 0 to 1, got {self.beta}")
        if self.temperature <= 0:
            raise InputError(f"temperature must be positive, got {self.temperature}")
        if self.attack.restarts != 1 or self.attack.target is not None:
            raise InputError("rslad walks once, away from the teacher's answer: it takes no restarts and no target")

    def under(self, controls: ClassControls) -> RSLAD:
        bound = replace(self)
        object.__setattr__(bound, "by_class", (controls.temperature_nat, controls.temperature_adv))
        return bound

    def perturb(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> Tensor:
        if controls.targets is not None:
            raise InputError("rslad walks away from the teacher's answer: it goes with no policy that aims at classes")
        attack, loss = self.attack, divergence(self.under(controls).answers(x, y)[1])
        problem = attack.pose(model, x, y, eps_scale=controls.eps_scale[y], generator=generator)
        size = attack.step_size if attack.step_size is not None else 2.5 * attack.threat.eps / attack.steps
        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            start = problem.ball.start(attack.start, problem.noise)
            return climb(problem, loss, start, attack.steps, size).detach().to(x.device)

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits_nat, logits_adv = both(model, x, x_adv)
        wanted_nat, wanted_adv = self.answers(x, y)
        return LossTerms(
            nat=(1 - self.beta) * divergence(wanted_nat)(logits_nat),
            adv=divergence(wanted_adv)(logits_adv),
            beta=self.beta,
            logits_nat=logits_nat,
            logits_adv=logits_adv,
        )

    @torch.no_grad()
    def answers(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) the teacher's logits on clean images, for the natural and for the adversarial term."""
        if not isinstance(self.teacher, nn.Module):
            raise InputError("rslad needs a teacher: name a robust model in the recipe's objective.teacher")
        with frozen(self.teacher):
            logits = logits_of(self.teacher(x)) / self.temperature
        nat, adv = (logits if scale is None else logits / scale[y][:, None] for scale in self.by_class)
        return nat, adv
