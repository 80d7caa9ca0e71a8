"""The published layouts of CIFAR-10, CIFAR-100, STL-10 and SVHN: binary records, Python pickles and MATLAB files."""

# N examples

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from classwise.core.errors import InputError, one_line
from classwise.data.datasets import DatasetCard
from classwise.data.decode import rows_at_a_time
from classwise.data.layouts.base import Layout, count_records, read_records, required_files
from classwise.data.layouts.safe_pickle import read_pickle
from classwise.data.sources import Part, Reading

MAX_COUNT = 10**5
"""Files with more images are refused before they are unpacked; the larger published one has 73,257."""
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


@dataclass(frozen=True, kw_only=True)
class Stl10Binary(Layout):
    """Red, green and blue planes in column-major order; labels from 1 to 10."""

    def files(self, folder: Path, split: str) -> list[Path]:
        every = [f"{part}_{what}.bin" for part in ("train", "test") for what in "Xy"]
        return required_files(folder, [f"{split}_X.bin", f"{split}_y.bin"], every)

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        images, labels = self.files(folder, split)
        count, label_count = count_records(images, 3 * 96 * 96), count_records(labels, 1)
        if count != label_count:
            raise InputError(f"{images} has {count} images, but {labels} has {label_count} labels")
        return Reading(count, card.shape, card.classes, _stl10_parts(images, labels, card))


def _stl10_parts(images: Path, labels: Path, card: DatasetCard) -> Iterator[Part]:
    rows = rows_at_a_time(card.shape)
    both = zip(read_records(images, 3 * 96 * 96, rows), read_records(labels, 1, rows), strict=True)
    for pixels, numbers in both:
        yield pixels.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2), numbers[:, 0].astype(np.int64) - 1


@dataclass(frozen=True, kw_only=True)
class SvhnMat(Layout):
    """``X`` (32, 32, 3, N) and ``y`` (N, 1), in which 10 is the digit 0."""

    def files(self, folder: Path, split: str) -> list[Path]:
        return required_files(folder, [f"{split}_32x32.mat"], ["train_32x32.mat", "test_32x32.mat"])

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        from scipy.io import loadmat, whosmat  # slow to import

        (file,) = self.files(folder, split)
        try:
            variables = {name: (shape, kind) for name, shape, kind in whosmat(file)}
            shape, kind = variables.get("X", ((), ""))
            count = shape[3] if len(shape) == 4 else 0
            expected = shape[:3] == (32, 32, 3) and kind == "uint8" and 0 < count <= MAX_COUNT
            if not expected or variables.get("y", ((), ""))[0] != (count, 1):
                raise InputError(f"{file}: contains {variables}; expected X (32, 32, 3, N) of uint8 and y (N, 1)")
            found = loadmat(file, variable_names=["X", "y"])
        except InputError:
            raise
        except Exception as error:  # scipy raises many kinds of exceptions on damaged files
            raise InputError(f"{file}: not a readable MATLAB file: {one_line(error)}") from error
        labels = found["y"][:, 0]
        if labels.dtype.kind not in "iu":
            raise InputError(f"{file}: labels are {labels.dtype}; expected integers")
        labels = np.where(labels == 10, 0, labels).astype(np.int64)
        return Reading(count, card.shape, card.classes, [(found["X"].transpose(3, 2, 0, 1), labels)])
