"""The batch that an attack works on: every access to the model goes through it and is counted per example."""

# B batch, K classes, Q queries per example, J functions of the logits

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.core.model_calls import RepeatSteps, State, Step, run_steps
from classwise.core.streams import Noise
from classwise.core.threat import Ball
from classwise.core.types import Effort

Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to logits (B, K)."""
Passes = NDArray[np.int64]
"""(2,) numbers of forward and backward passes."""
WORTH_LEAVING = 0.1
"""Share of a batch that must be finished before the rest continues as a smaller batch."""


class PassCounter:
    """Counts the passes through the model per example.

    Counts are kept on the host while consecutive passes concern the same examples, and added to the device tensors
    when the examples change.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._total = Effort.none(size, device)
        self._rows: Tensor | None = None
        self._pending = np.zeros(2, dtype=np.int64)
        self.passes_of_step: WeakKeyDictionary[Step, Passes] = WeakKeyDictionary()
        """Passes that one execution of a step takes."""

    def add(self, rows: Tensor, *, forwards: int = 0, backwards: int = 0) -> None:
        """Count passes for the examples at these positions."""
        self._pending = self.pending(rows) + np.array([forwards, backwards])

    def pending(self, rows: Tensor) -> Passes:
        """Return the passes counted on the host for these examples; zero if the last ones counted were others."""
        if rows is not self._rows:
            self.settle()
            self._rows = rows
        return self._pending

    def set_pending(self, passes: Passes) -> None:
        """Replace the count that ``pending`` returned."""
        self._pending = passes

    @property
    def effort(self) -> Effort:
        """The passes counted so far."""
        self.settle()
        return self._total

    def settle(self) -> None:
        """Add the counts kept on the host to the tensors."""
        if self._rows is not None:
            for total, count in zip((self._total.forwards, self._total.backwards), self._pending, strict=True):
                total.index_add_(0, self._rows, torch.full_like(self._rows, int(count)))
        self._rows, self._pending = None, np.zeros(2, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A batch under attack, with everything an algorithm may use. ``take`` selects examples from all parts."""

    forward: Forward
    """The model. Call it through ``logits`` and ``gradient``, which count passes."""
    ball: Ball
    y: Tensor
    """(B,) true labels."""
    noise: Noise
    counter: PassCounter
    """Counts for the whole batch, also where this is a part of it."""
    rows: Tensor
    """(B,) positions of these examples in the whole batch."""
    targets: Tensor | None = None
    """(B,) target classes; None: untargeted."""
    targets_checked: bool = False
    """Whether the targets are known to be valid classes, as those drawn from distributions are."""
    repeat_steps: RepeatSteps = run_steps
    """Runs a step several times; an optimized copy of the model replays it without the host."""
    slack: float = 0.0
    """Added to the true logit: the margin required for a misclassification, as the searched model may be inexact."""

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> Problem:
        """Return the part that concerns some examples, given by a mask or by positions."""
        return replace(
            self,
            ball=self.ball.take(rows),
            y=self.y[rows],
            noise=self.noise.take(rows),
            rows=self.rows[rows],
            targets=None if self.targets is None else self.targets[rows],
        )

    def repeated(self, attempts: Sequence[int]) -> Problem:
        """Return the same examples once per attempt, attempt by attempt, each attempt with its own random numbers."""
        rows = torch.arange(len(self), device=self.y.device).repeat(len(attempts))
        return replace(self.take(rows), noise=self.noise.fork(attempts))

    def logits(self, x: Tensor) -> Tensor:
        """Return logits without a gradient. ``x`` may hold Q queries per example, example by example (B * Q, ...)."""
        self.counter.add(self.rows, forwards=len(x) // len(self))
        with torch.no_grad():
            return self._logits(x)

    def gradient(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of a per-example loss of the logits, the losses (B,) and the logits, from one pass."""
        self.counter.add(self.rows, forwards=1, backwards=1)
        x = x.detach().requires_grad_()
        logits = self._logits(x)
        losses = loss(logits)
        # Of the sum, not of the mean: the gradient of an example must not shrink with the batch.
        (gradient,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
        return gradient, losses.detach(), logits.detach()

    def gradients(self, x: Tensor, functions: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients (B, J, C, H, W) of J functions of the logits, their values (B, J) and the logits."""
        x = x.detach().requires_grad_()
        logits = self._logits(x)
        values = functions(logits)
        last = values.shape[1] - 1
        self.counter.add(self.rows, forwards=1, backwards=last + 1)
        parts = [torch.autograd.grad(values[:, j].sum(), x, retain_graph=j < last)[0] for j in range(last + 1)]
        return torch.stack(parts, 1), values.detach(), logits.detach()

    def repeat(self, step: Step, state: State, times: int) -> State:
        """Return the state after several steps, which an optimized copy may replay without executing Python."""
        if self.repeat_steps is run_steps or not times:
            return run_steps(step, state, times)
        # Passes are counted only when Python runs a step, so the count of the first step is used for all.
        before, counter, further = self.counter.pending(self.rows), self.counter, times
        if step not in counter.passes_of_step:
            state, further = step(*state), times - 1
            counter.passes_of_step[step] = counter.pending(self.rows) - before
        state = self.repeat_steps(step, state, further)
        counter.set_pending(before + times * counter.passes_of_step[step])
        return state

    def survives(self, x: Tensor) -> Tensor:
        """(B,) bool: whether the model still assigns each image its true label."""
        return self.logits(x).argmax(1) == self.y

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.forward(x)
        if not self.slack:
            return logits
        y = self.y.repeat_interleave(len(x) // len(self), output_size=len(x))
        return logits.scatter_add(1, y[:, None], logits.new_full((1, 1), self.slack).expand(len(y), 1))


def per_pixel(values: Tensor, images: Tensor) -> Tensor:
    """Reshape one value per example (B,) to broadcast over images (B, ...)."""
    return values.view(-1, *[1] * (images.dim() - 1))
