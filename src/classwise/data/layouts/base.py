"""What a layout is: which files make a split, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from classwise.core.errors import InputError
from classwise.data.datasets import DatasetCard
from classwise.data.sources import Reading


class Layout(Protocol):
    """A way to lay a data set out on disk. A frozen dataclass; its repr is its identity."""

    @property
    def places(self) -> tuple[str, ...]:
        """Where below a folder of data sets it is looked for."""

    def files(self, folder: Path, split: str) -> list[Path]:
        """All files that are read for a split, in order.

        None where the folder is not laid out like this; an error where it is, but not whole.
        """

    def narrowed(self, card: DatasetCard, folder: Path) -> DatasetCard:
        """The card with the classes of a folder that was given without a name."""

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        """Begin to read."""


def whole(folder: Path, wanted: Sequence[str], every: Iterable[str]) -> list[Path]:
    """The wanted files of a folder; none where it has no file of the layout at all."""
    if not any((folder / name).is_file() for name in every):
        return []
    for name in wanted:
        if not (folder / name).is_file():
            raise InputError(f"{folder}: {name} is missing")
    return [folder / name for name in wanted]
