"""The published layouts of CIFAR-10 and CIFAR-100: binary records and Python pickles."""

# N examples

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from classwise.core.errors import InputError
from classwise.data.datasets import DatasetCard
from classwise.data.decode import rows_at_a_time
from classwise.data.layouts.base import Layout, count_records, read_records, required_files
from classwise.data.layouts.safe_pickle import read_pickle
from classwise.data.sources import Part, Reading

PIXELS = (3, 32, 32)
"""Red, green and blue planes in row-major order."""


@dataclass(frozen=True, kw_only=True)
class CifarBinary(Layout):
    """Records of one or two label bytes (coarse, fine) and 3072 bytes of pixels."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int

    def files(self, folder: Path, split: str) -> list[Path]:
        return required_files(folder, self.train if split == "train" else self.test, (*self.train, *self.test))

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        files = self.files(folder, split)
        length = self.label_bytes + 3072
        count = sum(count_records(file, length) for file in files)
        return Reading(count, card.shape, card.classes, self._parts(files, length))

    def _parts(self, files: list[Path], length: int) -> Iterator[Part]:
        for file in files:
            for records in read_records(file, length, rows_at_a_time(PIXELS)):
                labels = records[:, self.label_bytes - 1].astype(np.int64)
                yield records[:, self.label_bytes :].reshape(-1, *PIXELS), labels


@dataclass(frozen=True, kw_only=True)
class CifarPython(Layout):
    """Pickled dictionaries of an (N, 3072) array and a list of labels."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    """A file that identifies the layout, because the names of the others are common."""
    labels: bytes
    """The key of the labels in the dictionary."""

    def files(self, folder: Path, split: str) -> list[Path]:
        if not (folder / self.meta).is_file():
            return []
        return required_files(folder, self.train if split == "train" else self.test, (*self.train, *self.test))

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        parts = [self._part(file) for file in self.files(folder, split)]
        return Reading(sum(len(labels) for _, labels in parts), card.shape, card.classes, parts)

    def _part(self, file: Path) -> Part:
        found = read_pickle(file)
        if not isinstance(found, dict):
            raise InputError(f"{file}: contains an object of type {type(found).__name__}; expected a dictionary")
        images, labels = found.get(b"data"), found.get(self.labels)
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,):
            raise InputError(f"{file}: expected b'data' as a uint8 array of shape (N, 3072)")
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
            raise InputError(f"{file}: expected {self.labels!r} as a list of labels in 0..255")
        if len(labels) != len(images):
            raise InputError(f"{file}: {len(images)} images but {len(labels)} labels")
        return images.reshape(-1, *PIXELS), np.array(labels, dtype=np.int64)
