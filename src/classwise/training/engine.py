"""One optimisation step: attack, loss, class controls, update. Eager; the reference for any faster engine."""

# B batch, K classes

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from classwise.errors import InputError
from classwise.noise import Randomness
from classwise.training.averaging import WeightAverage
from classwise.types import ClassControls, LossTerms, Objective, Policy, reduce

Precision = Literal["fp32", "bf16"]
"""Of convolutions and products; images, weights, losses and projections are float32 in any case."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """The moving parts of training and the step that moves them."""

    model: nn.Module
    objective: Objective
    policy: Policy
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    precision: Precision
    clip: float | None
    warmup: float = 0.0
    """Seconds spent on getting ready, which later steps do not have."""

    def terms(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness
    ) -> LossTerms:
        """The objective's loss terms in the chosen precision. Images, losses and projections stay in float32."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.objective(model, x, y, controls, generator=generator)

    def step(self, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> tuple[LossTerms, Tensor]:
        """Train on one batch; the terms and the mean loss, still on the device."""
        self.model.train()
        terms = self.terms(self.model, x, y, controls, generator)
        loss = reduce(terms, y, self.policy.on_batch(terms, y) or controls)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return terms, loss.detach()

    def update(self) -> None:
        """Move the weights by the gradients they have."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model)

    def searched(self) -> nn.Module:
        """What attacks on the result should search, until the next step: the result, or a faster twin of it."""
        return self.result

    @property
    def result(self) -> nn.Module:
        """The model a run hands out: the averaged one where weights are averaged."""
        return self.model if self.average is None else self.average.model


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse bf16 where it would kill the process: some virtual CPUs announce bf16 units that they do not have.

    The instruction is tried in a process of its own, because nothing survives it where it is missing.
    """
    if precision == "fp32" or device.type != "cpu":
        return
    trial = "import torch; x = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode != 0:
        raise InputError("precision = 'bf16' does not work on this CPU: use 'fp32'")
