"""How long work tells how far it is, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Where long work reports. Commands show it; a program may pass its own."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """A task of ``total`` units begins; ``done`` of them were finished before."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Some units are finished."""

    def finish(self) -> None:
        """The task is over."""


class Silent(Progress):
    """Reports nothing."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, amount: int = 1, note: str = "") -> None:
        pass

    def finish(self) -> None:
        pass


SILENT = Silent()
