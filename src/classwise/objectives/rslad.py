"""RSLAD, robust soft label adversarial distillation (Zi et al. 2021): a student learns the outputs of a robust teacher.

With q = softmax(T(x) / tau) the teacher's output on the natural image and p the student's output,

    L = (1 - beta) * KL(q || p(x)) + beta * max KL(q || p(x')),   beta = 5/6.

Labels are not used. tau is 1 in the paper; ABSLD (Zhao et al. 2024) has a temperature per class and term.

Deviations
* KL is summed over the classes; the authors' code averages it, which makes the loss K times smaller.
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
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both, frozen, logits_of
from classwise.core.streams import Randomness
from classwise.core.types import AttackCall, ClassControls, LossTerms, Objective


@dataclass(frozen=True, kw_only=True)
class RSLAD(Objective):
    """Distillation of a robust teacher: divergence from its outputs on natural images, instead of labels.

    Batch-norm statistics are updated by the natural, then by the adversarial batch.
    """

    paper: ClassVar[str] = "Zi et al. 2021"
    needs_teacher: ClassVar[bool] = True

    teacher: InstanceOf[nn.Module] | str | None = field(default=None, repr=False)
    """The model to learn from: a run directory or any other model spec."""
    beta: Number = 5 / 6
    """Strength of the adversarial term; that of the natural term is 1 - beta."""
    temperature: Number = 1.0
    """Divisor of the teacher's logits."""
    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")
    by_class: tuple[Tensor | None, Tensor | None] = field(default=(None, None), init=False, repr=False, compare=False)
    """(K,) temperatures relative to ``temperature`` for the natural and the adversarial term; None: 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise InputError(f"beta must lie between 0 and 1, got {self.beta}")
        if self.temperature <= 0:
            raise InputError(f"temperature must be positive, got {self.temperature}")
        if self.attack.restarts != 1 or self.attack.target is not None:
            raise InputError("objective 'rslad' needs an untargeted attack without restarts")

    def under(self, controls: ClassControls) -> RSLAD:
        bound = replace(self)
        object.__setattr__(bound, "by_class", (controls.temperature_nat, controls.temperature_adv))
        return bound

    def perturb(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> Tensor:
        if controls.targets is not None:
            raise InputError("objective 'rslad' does not support policies that set targets")
        loss = divergence(self.under(controls).teacher_logits(x, y)[1])
        with self.attack.searching(AttackCall.under(controls, model, x, y, generator)) as problem:
            return self.attack.ascend(problem, loss).detach().to(x.device)

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits_nat, logits_adv = both(model, x, x_adv)
        teacher_nat, teacher_adv = self.teacher_logits(x, y)
        return LossTerms(
            nat=(1 - self.beta) * divergence(teacher_nat)(logits_nat),
            adv=divergence(teacher_adv)(logits_adv),
            beta=self.beta,
            logits_nat=logits_nat,
            logits_adv=logits_adv,
        )

    @torch.no_grad()
    def teacher_logits(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's logits (B, K) on natural images for the natural and for the adversarial term."""
        if not isinstance(self.teacher, nn.Module):
            raise InputError("objective 'rslad' needs a teacher: name a robust model in the recipe's objective.teacher")
        with frozen(self.teacher):
            logits = logits_of(self.teacher(x)) / self.temperature
        nat, adv = (logits if scale is None else logits / scale[y][:, None] for scale in self.by_class)
        return nat, adv
