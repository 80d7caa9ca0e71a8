"""What goes with what: which controls an objective obeys, what it costs, and which policies make sense on it.

Found out by asking: every objective trains on a few random images with a model of one layer that counts its passes.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from classwise.core.threat import Threat
from classwise.core.types import ClassControls, Objective, Policy, reduce
from classwise.models import HypersphereHead

BACKWARD = 2.0
"""Cost of a backward pass in forward passes."""
SIZE, CLASSES = 4, 3


@dataclass(frozen=True, slots=True)
class Nature:
    """What an objective is, seen from outside."""

    obeys: frozenset[str]
    """The class controls that make a difference to it."""
    cost: float
    """Forward passes an image takes in an epoch, a backward pass counted as two, a teacher's as one."""


def nature_of(objective: Objective) -> Nature:
    """Train on one batch and look."""
    with torch.random.fork_rng(devices=[]):  # a model draws its weights, and the caller's random state is not ours
        objective, model = _bounded(objective), _Counting()
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(SIZE, 1, 2, 2, generator=random), torch.arange(SIZE) % CLASSES
    even = ClassControls.uniform(CLASSES)
    objective.on_epoch(model, 1)
    x_adv = objective.perturb(model, x, y, even, generator=random)
    for replay in range(objective.replays):
        x_adv = x_adv if replay == 0 else objective.again(x, x_adv, y, even)
        reduce(objective.terms(model, x, x_adv, y), y, even).backward()  # type: ignore[no-untyped-call]
    asked = objective.teacher.forwards if isinstance(objective.teacher, _Counting) else 0
    return Nature(objective.used_controls, (model.forwards + BACKWARD * model.backwards + asked) / SIZE)


def conflict(policy: Policy | type[Policy], objective: Objective) -> str | None:
    """Why a policy makes no sense on an objective; None if it does."""
    turns, obeys = set(policy.turns), objective.used_controls
    if objective.attack is None and ("targets" in turns or "batch.logits_adv" in policy.uses):
        return "it needs a training attack, and there is none"
    if "targets" in turns and "targets" not in obeys:
        untargeted = "the objective does not support targets"
        kl = "loss 'kl' does not support targets: set loss to ce, margin or dlr in the recipe's attack table"
        return f"it needs a targeted training attack, and {kl if objective.supports_targets else untargeted}"
    if turns and not turns & obeys:
        return f"it turns {', '.join(policy.turns)}, which makes no difference here"
    return None


def _bounded(objective: Any) -> Objective:
    """With some ball, where its attack has none, and some teacher, where it has one."""
    if objective.needs_teacher:
        objective = replace(objective, teacher=_Counting())
    attack = objective.attack
    if attack is None or attack.eps is not None:
        return objective  # type: ignore[no-any-return]
    return replace(objective, attack=attack.within(Threat.parse(0.1)))  # type: ignore[no-any-return]


class _Counting(nn.Module):
    """A model with the head that every objective takes. Counts images forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.head = HypersphereHead(4, CLASSES)
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        logits: Tensor = self.head(x.flatten(1))
        if logits.requires_grad:
            logits.register_hook(self._back)  # type: ignore[no-untyped-call]
        return logits

    def _back(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)
