"""The base class of layouts, and reading of files with records of fixed length.

Layouts have their own readers because files are untrusted: sizes are checked before memory is allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError, one_line
from classwise.data.datasets import DatasetCard
from classwise.data.sources import Reading


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """A published file layout of a data set. Its ``repr`` is part of the fingerprint of a source."""

    places: tuple[str, ...]
    """The folders below a directory of data sets that are searched for it."""

    @abstractmethod
    def files(self, folder: Path, split: str) -> list[Path]:
        """Return all files of a split in order, or an empty list if the folder has another layout.

        Raises ``InputError`` if the folder has this layout but files are missing.
        """

    def narrowed(self, card: DatasetCard, folder: Path) -> DatasetCard:
        """Return the card with the classes and size found in a folder that was given without a name."""
        return card

    @abstractmethod
    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        """Start reading a split."""


def required_files(folder: Path, wanted: Sequence[str], every: Iterable[str]) -> list[Path]:
    """Return the wanted files of a folder, or an empty list if it has no file of the layout."""
    if not any((folder / name).is_file() for name in every):
        return []
    for name in wanted:
        if not (folder / name).is_file():
            raise InputError(f"{folder}: {name} is missing")
    return [folder / name for name in wanted]


def count_records(file: Path, length: int) -> int:
    """Return the number of records of ``length`` bytes in a file."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    if size == 0 or size % length:
        raise InputError(f"{file}: {size} bytes; expected a positive multiple of the record length {length}")
    return size // length


def read_records(file: Path, length: int, rows: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of up to ``rows`` records at a time, (n, length)."""
    try:
        with file.open("rb") as opened:
            while block := opened.read(rows * length):
                yield np.frombuffer(block, dtype=np.uint8).reshape(-1, length)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
