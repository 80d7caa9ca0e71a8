"""Files that are records of one length, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError, one_line


def count_records(file: Path, length: int) -> int:
    """How many records of a length a file holds."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    if size == 0 or size % length:
        raise InputError(f"{file}: {size} bytes are no whole number of records of {length}")
    return size // length


def read_records(file: Path, length: int, rows: int) -> Iterator[NDArray[np.uint8]]:
    """(n, length) bytes of some records at a time."""
    try:
        with file.open("rb") as opened:
            while block := opened.read(rows * length):
                yield np.frombuffer(block, dtype=np.uint8).reshape(-1, length)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
