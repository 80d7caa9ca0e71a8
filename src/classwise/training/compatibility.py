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
    teacher = getattr(objective, "teacher", None)
    objective.on_epoch(model, 1)
    x_adv = objective.perturb(model, x, y, even, generator=random)
    for replay in range(objective.replays):
        x_adv = x_adv if replay == 0 else objective.again(x, x_adv, y, even)
        terms = objective.terms(model, x, x_adv, y)
        reduce(terms, y, even).backward()  # type: ignore[no-untyped-call]
    obeys = {"sampling"}
    obeys |= {"weight_nat"} if torch.any(terms.nat) else set()
    obeys |= {"weight_adv", "beta_scale"} if terms.beta and torch.any(terms.adv) else set()
    obeys |= {"eps_scale"} if objective.attack is not None else set()
    obeys |= {"targets"} if _can_aim(objective) else set()
    obeys |= {"temperature_nat", "temperature_adv"} if teacher is not None else set()
    asked = 0 if teacher is None else teacher.forwards
    return Nature(frozenset(obeys), (model.forwards + BACKWARD * model.backwards + asked) / SIZE)


def conflict(policy: Policy | type[Policy], objective: Objective) -> str | None:
    """Why a policy makes no sense on an objective; None if it does."""
    turns, obeys = set(policy.turns), nature_of(objective).obeys
    if objective.attack is None and ("targets" in turns or "batch.logits_adv" in policy.uses):
        return "it needs a training attack, and there is none"
    if "targets" in turns and "targets" not in obeys:
        cure = "its loss 'kl' knows no target: set loss to ce, margin or dlr in the recipe's attack table"
        return f"it aims the training attack, and {'this one cannot aim' if _walks_alone(objective) else cure}"
    if turns and not turns & obeys:
        return f"it turns {', '.join(policy.turns)}, which makes no difference here"
    return None


def _can_aim(objective: Objective) -> bool:
    attack = objective.attack
    return attack is not None and not _walks_alone(objective) and getattr(attack, "loss", None) != "kl"


def _walks_alone(objective: Objective) -> bool:
    """Whether it makes its adversarial images in a way of its own, which knows no targets."""
    return type(objective).perturb is not Objective.perturb


def _bounded(objective: Any) -> Objective:
    """With some ball, where its attack has none, and some teacher, where it has one."""
    if hasattr(objective, "teacher"):
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
