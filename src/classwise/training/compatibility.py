"""Compatibility of policies with objectives, and the cost of a training step.

The cost is measured in one step on a few random images. Objectives need not declare it, and the value is also correct
for objectives from user files.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from classwise.core.threat import Threat
from classwise.core.types import ClassControls, Objective, Policy, reduce
from classwise.models import HypersphereHead

BACKWARD = 2.0
"""Cost of a backward pass in forward passes."""
BATCH, CLASSES = 4, 3


def passes_per_image(objective: Objective) -> float:
    """Measure the forward passes per image and epoch of an objective by one training step.

    A backward pass counts as two, a teacher's forward pass as one.
    """
    with torch.random.fork_rng(devices=[]):
        model, teacher = _CountingModel(), _CountingModel()
    settings: Any = objective
    if objective.needs_teacher:
        settings = replace(settings, teacher=teacher)
    if settings.attack is not None and settings.attack.eps is None:
        settings = replace(settings, attack=settings.attack.within(Threat.parse(0.1)))
    objective = settings
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(BATCH, 1, 2, 2, generator=random), torch.arange(BATCH) % CLASSES
    controls = ClassControls.uniform(CLASSES)
    objective.on_epoch(model, 1)
    x_adv = objective.perturb(model, x, y, controls, generator=random)
    for replay in range(objective.replays):
        x_adv = x_adv if replay == 0 else objective.again(x, x_adv, y, controls)
        reduce(objective.terms(model, x, x_adv, y), y, controls).backward()  # type: ignore[no-untyped-call]
    return (model.forwards + BACKWARD * model.backwards + teacher.forwards) / BATCH


def conflict(policy: Policy | type[Policy], objective: Objective) -> str | None:
    """Return the reason why a policy cannot be combined with an objective; None if it can."""
    controls, used = set(policy.turns), objective.used_controls
    if objective.attack is None and ("targets" in controls or "batch.logits_adv" in policy.uses):
        return "it needs a training attack, and the objective has none"
    if "targets" in controls and "targets" not in used:
        kl = "the attack loss 'kl' does not support targets: set loss to ce, margin or dlr in the recipe's attack table"
        untargeted = kl if objective.supports_targets else "the objective's own attack does not support targets"
        return f"it needs a targeted training attack, and {untargeted}"
    if controls and not controls & used:
        return f"it sets {' and '.join(policy.turns)}, which this objective does not use"
    return None


class _CountingModel(nn.Module):
    """A linear model with a head that every objective accepts. Counts images in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = HypersphereHead(4, CLASSES)
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        logits: Tensor = self.head(x.flatten(1))
        if logits.requires_grad:
            logits.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        return logits

    def _count_backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)
