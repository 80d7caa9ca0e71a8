"""Sources of images: their protocol, reading them into memory, and scikit-learn's digits."""

# N examples, C channels, H height, W width

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError, unknown
from classwise.core.progress import SILENT, Progress
from classwise.data.arrays import ImageSet
from classwise.data.datasets import DATASETS
from classwise.storage.files import digest_json

FORMAT = 1
"""The version of decoding, part of every fingerprint: increase it when the same files give different arrays."""

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""A chunk of images (n, C, H, W) and labels (n,)."""


@dataclass(frozen=True)
class Reading:
    """An opened source, read in parts so that it never has to fit into memory."""

    count: int
    """The number of images."""
    shape: tuple[int, int, int]
    """(C, H, W) of every image."""
    classes: tuple[str, ...]
    parts: Iterable[Part]
    """All images in order; can be iterated over once."""


class Source(Protocol):
    """A data set split that can be read."""

    @property
    def name(self) -> str:
        """The name of the data set, as in reports."""

    @property
    def split(self) -> str:
        """The data split."""

    def origin(self) -> str:
        """Return where the images come from, to be displayed."""

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with the images, without reading all of them if possible."""

    def open(self) -> Reading:
        """Start reading."""


def walk(source: Source, reading: Reading, progress: Progress) -> Iterator[tuple[slice, Part]]:
    """Yield the parts of a reading with their slices; raises if the number of images differs from the announced one."""
    progress.start(f"decode {source.name}/{source.split}", reading.count)
    start = 0
    for images, labels in reading.parts:
        part = slice(start, start + len(images))
        start = part.stop
        if start > reading.count:
            break
        yield part, (images, labels)
        progress.advance(len(images))
    if start != reading.count:
        raise InputError(
            f"{source.name}: found {'more' if start > reading.count else start} images; expected {reading.count}: "
            "the files are damaged or changed while they were read"
        )
    progress.finish()


def read(source: Source, progress: Progress = SILENT) -> ImageSet:
    """Read all images of a source into memory."""
    return collect(source, source.open(), progress)


def collect(source: Source, reading: Reading, progress: Progress) -> ImageSet:
    """Read all images of an opened source into memory."""
    images = np.empty((reading.count, *reading.shape), dtype=np.uint8)
    labels = np.empty(reading.count, dtype=np.int64)
    for part, found in walk(source, reading, progress):
        images[part], labels[part] = found
    return ImageSet(name=source.name, split=source.split, images=images, labels=labels, classes=reading.classes)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels: 110 per class for training, the other 697 for testing.

    The data set has no official split. This one is drawn within each class by a generator whose stream numpy
    guarantees not to change.
    """

    split: str = "test"

    @property
    def name(self) -> str:
        return "digits"

    def origin(self) -> str:
        return "scikit-learn"

    def fingerprint(self) -> str:
        return digest_json([FORMAT, self.name, self.split])

    def open(self) -> Reading:
        card = DATASETS["digits"]
        if self.split not in card.splits:
            raise unknown("split of digits", self.split, card.splits)
        from sklearn.datasets import load_digits  # slow to import, and unnecessary once the images are cached

        found = load_digits()
        labels = found.target.astype(np.int64)
        images = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
        random = np.random.RandomState(0)
        train = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            train[random.permutation(np.flatnonzero(labels == label))[:110]] = True
        rows = np.flatnonzero(train if self.split == "train" else ~train)
        return Reading(len(rows), card.shape, card.classes, [(images[rows], labels[rows])])
