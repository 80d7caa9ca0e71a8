"""How long work tells how far it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """An epoch that a training has finished. Its numbers are on disk when this is told."""

    run: Path
    """The run directory."""
    epochs: int
    """So many the recipe asks for."""
    classes: Sequence[str]
    history: Sequence[Mapping[str, Any]]
    """The records of metrics.jsonl, this epoch's last; after a resumption with those of before."""

    @property
    def record(self) -> Mapping[str, Any]:
        """The record of this epoch."""
        return self.history[-1]


class Progress(Protocol):
    """Where long work reports. Commands show it; a program may pass its own."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """A task of ``total`` units begins; ``done`` of them were finished before."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Some units are finished."""

    def epoch(self, epoch: Epoch) -> None:
        """A training has finished an epoch; of several side by side, one of them."""

    def finish(self) -> None:
        """The task is over."""


class Silent(Progress):
    """Reports nothing."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, amount: int = 1, note: str = "") -> None:
        pass

    def epoch(self, epoch: Epoch) -> None:
        pass

    def finish(self) -> None:
        pass


SILENT = Silent()
