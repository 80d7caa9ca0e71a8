"""Process examples in batches, in smaller ones after running out of memory."""

# N examples

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints

SAVE_SECONDS = 5.0
"""Seconds between two saves: the most work that an interruption can lose."""


@dataclass(slots=True, kw_only=True)
class BatchLoop:
    """Settings of loops over examples that share a batch size."""

    size: int
    """Maximum batch size. Halved each time memory runs out."""
    progress: Progress
    save: Callable[[], None] = lambda: None
    """Called every few seconds."""
    free: Callable[[], None] = lambda: None
    """Frees memory before a batch is retried."""
    reduced: bool = False
    """Whether memory ran out."""
    saved: float = field(default_factory=time.monotonic)
    """Time of the last save."""

    def run(self, task: str, pending: Bools, process: Callable[[Ints], None]) -> None:
        """Call ``process`` with the indices of the pending examples (N,), in batches of equal size.

        Raises ``InputError`` when there is not enough memory for one example.
        """
        rows = np.flatnonzero(pending)
        self.progress.start(task, len(pending), len(pending) - len(rows))
        while len(rows):
            batch = rows[: math.ceil(len(rows) / math.ceil(len(rows) / self.size))]
            try:
                process(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise InputError(f"{task}: out of memory at batch size 1") from error
                self.size, self.reduced = len(batch) // 2, True
                self.free()
                self.progress.advance(0, f"out of memory: continuing with batches of {self.size}")
                continue
            rows = rows[len(batch) :]
            self.progress.advance(len(batch))
            if time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()
                self.saved = time.monotonic()
        self.progress.finish()
