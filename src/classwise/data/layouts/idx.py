"""The idx format of MNIST and Fashion-MNIST, optionally gzipped."""

# N examples

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from classwise.core.errors import InputError, one_line
from classwise.data.datasets import DatasetCard
from classwise.data.decode import rows_at_a_time
from classwise.data.folders import entries
from classwise.data.layouts.base import Layout
from classwise.data.sources import Part, Reading

PREFIX = {"train": "train", "test": "t10k"}
UNSIGNED_BYTE = 0x08
READ_ERRORS = (OSError, EOFError, zlib.error)
"""The exceptions of reading a damaged file."""


@dataclass(frozen=True, kw_only=True)
class Idx(Layout):
    """``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte``, ``t10k`` for test, optionally with ``.gz``."""

    def files(self, folder: Path, split: str) -> list[Path]:
        pattern = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
        files = [file for file in reversed(entries(folder)) if file.is_file()]
        matches = [(pattern.fullmatch(file.name), file) for file in files]
        # In reverse order an unpacked file overwrites its archive.
        present = {match.group(1, 2): file for match, file in matches if match}
        if not present:
            return []
        wanted = [(PREFIX.get(split, split), what) for what in ("images", "labels")]
        for prefix, what in wanted:
            if (prefix, what) not in present:
                raise InputError(f"{folder}: {prefix}-{what}-idx{3 if what == 'images' else 1}-ubyte is missing")
        return [present[key] for key in wanted]

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        images, labels = self.files(folder, split)
        with _opened(images) as file:
            count, *size = _header(file, images, 3)
        with _opened(labels) as file:
            (label_count,) = _header(file, labels, 1)
        if tuple(size) != card.size:
            raise InputError(
                f"{images}: images have {size[0]}x{size[1]} pixels; expected {card.size[0]}x{card.size[1]}"
            )
        if count != label_count:
            raise InputError(f"{images} has {count} images, but {labels} has {label_count} labels")
        return Reading(count, card.shape, card.classes, _parts(images, labels, card, count))


def _parts(images: Path, labels: Path, card: DatasetCard, count: int) -> Iterator[Part]:
    rows = rows_at_a_time(card.shape)
    with _opened(images) as pixels, _opened(labels) as numbers:
        _header(pixels, images, 3)
        _header(numbers, labels, 1)
        for start in range(0, count, rows):
            n = min(rows, count - start)
            found = _exactly(pixels, images, n * card.size[0] * card.size[1])
            yield found.reshape(n, *card.shape), _exactly(numbers, labels, n).astype(np.int64)
        for file, path in ((pixels, images), (numbers, labels)):
            if _read(file, path, 1):
                raise InputError(f"{path}: the file is longer than its header states")


def _opened(path: Path) -> BinaryIO:
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error


def _header(file: BinaryIO, path: Path, dimensions: int) -> list[int]:
    """Return the lengths of the dimensions."""
    found = _exactly(file, path, 4 + 4 * dimensions)
    if found[:4].tolist() != [0, 0, UNSIGNED_BYTE, dimensions]:
        raise InputError(f"{path}: not an idx file of unsigned bytes with {dimensions} dimensions")
    return [int(length) for length in found[4:].view(">u4")]


def _exactly(file: BinaryIO, path: Path, count: int) -> np.ndarray:
    found = _read(file, path, count)
    if len(found) != count:
        raise InputError(f"{path}: the file is truncated: it ends before the length in its header")
    return np.frombuffer(found, dtype=np.uint8)


def _read(file: BinaryIO, path: Path, count: int) -> bytes:
    try:
        return file.read(count)
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
