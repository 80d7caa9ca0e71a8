"""A batch under attack: what an algorithm may ask and must respect, narrowed together when examples leave.

Every question to the model goes through here, so the forward and backward passes of each example are counted in one
place and never by the author of an attack.
"""

# B batch, K classes, Q queries an example, J functions of the logits

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.core.model_calls import State, Step, stepped
from classwise.core.streams import Noise
from classwise.core.threat import Ball
from classwise.core.types import Effort

Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to logits (B, K)."""
Repeat = Callable[[Step, State, int], State]
"""A step so many times."""
Passes = NDArray[np.int64]
"""(2,) forwards and backwards."""
WORTH_LEAVING = 0.1
"""The share of a batch that must be done before the rest goes on in a smaller one."""


class Tally:
    """The passes of every example of a batch, added up on the host as long as the same ones are asked."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._settled = Effort.none(size, device)
        self._rows: Tensor | None = None
        self._passes = np.zeros(2, dtype=np.int64)
        self.steps: WeakKeyDictionary[Step, Passes] = WeakKeyDictionary()
        """What one step of a search takes."""

    def add(self, rows: Tensor, *, forwards: int, backwards: int = 0) -> None:
        """Some examples, by their places, were asked so often."""
        self._passes = self.recent(rows) + np.array([forwards, backwards])

    def recent(self, rows: Tensor) -> Passes:
        """What it was since these examples are asked."""
        if rows is not self._rows:
            self._settle()
            self._rows = rows
        return self._passes

    def put(self, passes: Passes) -> None:
        """Make it so many."""
        self._passes = passes

    @property
    def effort(self) -> Effort:
        """What came together."""
        self._settle()
        return self._settled

    def _settle(self) -> None:
        if self._rows is not None:
            for part, count in zip((self._settled.forwards, self._settled.backwards), self._passes, strict=True):
                part.index_add_(0, self._rows, torch.full_like(self._rows, int(count)))
        self._rows, self._passes = None, np.zeros(2, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The examples an algorithm works on."""

    forward: Forward
    """The model itself. Ask it through ``logits`` and ``gradient``, which count."""
    ball: Ball
    y: Tensor
    """(B,) true labels."""
    noise: Noise
    tally: Tally
    """Of the whole batch, whatever part of it is left here."""
    rows: Tensor
    """(B,) places of these examples in the whole batch."""
    targets: Tensor | None = None
    """(B,) classes the caller wants the examples to be taken for."""
    drawn: bool = False
    """Whether these were drawn from shares: then they are classes, and nobody has to look at them."""
    repeats: Repeat | None = None
    """How the model goes through many steps without the host; None: one by one."""
    slack: float = 0.0
    """How far beyond the boundary a label counts as lost: as much as the model asked may differ from the one meant."""

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> Problem:
        """The part of it that concerns some examples (a mask or places)."""
        return replace(
            self,
            ball=self.ball.take(rows),
            y=self.y[rows],
            noise=self.noise.take(rows),
            rows=self.rows[rows],
            targets=None if self.targets is None else self.targets[rows],
        )

    def attempts(self, numbers: Sequence[int]) -> Problem:
        """The same examples once for each attempt, attempt by attempt, every one with noise of its own."""
        rows = torch.arange(len(self), device=self.y.device).repeat(len(numbers))
        return replace(self.take(rows), noise=self.noise.fork(numbers))

    def logits(self, x: Tensor) -> Tensor:
        """Logits without a gradient. ``x`` may hold Q queries an example: (B · Q, C, H, W), example by example."""
        self.tally.add(self.rows, forwards=len(x) // len(self))
        with torch.no_grad():
            return self._answers(x)

    def gradient(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of a per-example loss of the logits, the losses (B,) and the logits, of one pass.

        The sum is differentiated, not the mean: gradients of single examples must not shrink with the batch.
        """
        self.tally.add(self.rows, forwards=1, backwards=1)
        x = x.detach().requires_grad_()
        logits = self._answers(x)
        losses = loss(logits)
        (gradient,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
        return gradient, losses.detach(), logits.detach()

    def gradients(self, x: Tensor, functions: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (B, J, C, H, W) of J functions (B, J) of the logits, their values and the logits, of one pass."""
        x = x.detach().requires_grad_()
        logits = self._answers(x)
        values = functions(logits)
        last = values.shape[1] - 1
        self.tally.add(self.rows, forwards=1, backwards=last + 1)
        parts = [torch.autograd.grad(values[:, j].sum(), x, retain_graph=j < last)[0] for j in range(last + 1)]
        return torch.stack(parts, 1), values.detach(), logits.detach()

    def repeat(self, step: Step, state: State, times: int) -> State:
        """The state after so many steps. They may run without this program, which so counts what the first takes."""
        if self.repeats is None or not times:
            return stepped(step, state, times)
        before, tally, further = self.tally.recent(self.rows), self.tally, times
        if step not in tally.steps:
            state, further = step(*state), times - 1
            tally.steps[step] = tally.recent(self.rows) - before
        state = self.repeats(step, state, further)
        tally.put(before + times * tally.steps[step])
        return state

    def survives(self, x: Tensor) -> Tensor:
        """(B,) bool: whether the model still gives each image its label."""
        return self.logits(x).argmax(1) == self.y

    def _answers(self, x: Tensor) -> Tensor:
        logits = self.forward(x)
        if not self.slack:
            return logits
        y = self.y.repeat_interleave(len(x) // len(self), output_size=len(x))
        return logits.scatter_add(1, y[:, None], logits.new_full((1, 1), self.slack).expand(len(y), 1))
