"""Progress reporting of long tasks, independent of its display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A finished epoch of a training. Its metrics are on disk when it is reported."""

    run: Path
    """The run directory."""
    epochs: int
    """Number of epochs in the recipe."""
    classes: Sequence[str]
    history: Sequence[Mapping[str, Any]]
    """All records of metrics.jsonl up to this epoch, including those before ``--resume``."""

    @property
    def record(self) -> Mapping[str, Any]:
        """The record of this epoch in metrics.jsonl."""
        return self.history[-1]


class Progress:
    """Receives progress reports and ignores them. Commands and programs override its methods."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """Start a task of ``total`` units, of which ``done`` are finished already."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Report finished units."""

    def epoch(self, epoch: Epoch) -> None:
        """Report a finished epoch of one training."""

    def finish(self) -> None:
        """End the task."""


SILENT = Progress()
