"""One training step: attack, loss, class controls, update. This eager engine is the reference for the compiled one."""

# B batch, K classes

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError
from classwise.core.streams import Randomness
from classwise.core.types import ClassControls, ClassStats, LossTerms, Objective, Policy, reduce
from classwise.training.averaging import Average
from classwise.training.distributed import SINGLE, ProcessGroup
from classwise.training.model_views import bfloat16_view, synchronized_view
from classwise.training.weight_perturbation import WeightPerturbation

Precision = Literal["fp32", "bf16"]
"""Precision of convolutions and matrix products; images, weights, last layer, losses and projections are float32."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """Model, optimizer and average of a training, and the step that updates them."""

    model: nn.Module
    objective: Objective
    policy: Policy
    optimizer: torch.optim.Optimizer
    average: Average | None
    precision: Precision
    clip: float | None
    awp: WeightPerturbation | None = None
    group: ProcessGroup = SINGLE
    """The processes that share every batch."""
    warmup: float = 0.0
    """Seconds spent on compilation so far."""
    view: nn.Module = field(init=False)
    """The model in the chosen precision."""

    def __post_init__(self) -> None:
        self.view = self.searched(self.model if self.group.size == 1 else synchronized_view(self.model, self.group))

    def step(self, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> tuple[ClassStats, Tensor]:
        """Train on one batch, or this process's share of it; returns statistics and mean loss on the device."""
        self.view.train()
        x_adv = self.attacked(self.view, x, y, controls, generator)
        for replay in range(self.objective.replays):
            x_adv = x_adv if replay == 0 else self.objective.again(x, x_adv, y, controls)
            self.optimizer.zero_grad(set_to_none=True)
            terms, loss = self.descend(self.view, x, x_adv, y, controls)
            self.update()
        return ClassStats.of(terms, y, controls.num_classes), loss

    def attacked(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness
    ) -> Tensor:
        """Return adversarial images of a batch. ``model`` computes what the engine's model computes."""
        return self.objective.perturb(model, x, y, controls, generator=generator)

    def descend(
        self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, controls: ClassControls
    ) -> tuple[LossTerms, Tensor]:
        """Compute loss terms and mean loss, and leave the gradient in the weights."""

        def loss_of() -> tuple[LossTerms, Tensor]:
            terms = self.objective.under(controls).terms(model, x, x_adv, y)
            now = self.policy.on_batch(*self.group.gather(terms, y)) or controls
            return terms, self.group.weighted(reduce(terms, y, now), len(y))

        perturbation = (
            nullcontext() if self.awp is None else self.awp.perturbed(self.model, lambda: loss_of()[1], self.group)
        )
        with perturbation:
            terms, loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        self.group.sum([loss, *(weight.grad for weight in self.model.parameters() if weight.grad is not None)])
        return terms, loss

    def update(self) -> None:
        """Update weights and average by the gradients in the weights."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.on_step(self.model)

    def reset(self) -> None:
        """Discard what was compiled, because a part of the engine has changed."""

    def searched(self, model: nn.Module) -> nn.Module:
        """Return the model that attacks search instead of the trained model or its average, until the next step."""
        return bfloat16_view(model) if self.precision == "bf16" else model

    @property
    def result(self) -> nn.Module:
        """The model that a run produces: the averaged one if there is an average."""
        averaged = None if self.average is None else self.average.model
        return self.model if averaged is None else averaged


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise if bf16 does not work: some virtual CPUs report bf16 instructions that they do not have.

    The instruction is tried in a separate process, because a missing one kills the process.
    """
    if precision == "fp32" or device.type != "cpu":
        return
    trial = "import torch; x = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode != 0:
        raise InputError("precision = 'bf16' does not work on this CPU: use 'fp32'")
