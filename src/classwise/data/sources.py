"""What images are read from, some at a time: the protocol, scikit-learn's digits, and the user's own code."""

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
"""Part of every fingerprint: raised when the same files would be read into other arrays than before."""

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Some images (n, C, H, W) and their labels (n,)."""


@dataclass(frozen=True)
class Reading:
    """A data set about to be read, part by part, so that it never has to fit into memory."""

    count: int
    """N."""
    shape: tuple[int, int, int]
    """(C, H, W) of every image."""
    classes: tuple[str, ...]
    parts: Iterable[Part]
    """All images in order; to be walked through once."""


class Source(Protocol):
    """Something that images can be read from."""

    @property
    def name(self) -> str:
        """Of the data set, as in reports."""

    @property
    def split(self) -> str:
        """Which part of the data set."""

    def origin(self) -> str:
        """Where the images come from, for people."""

    def fingerprint(self) -> str:
        """Hexadecimal digits that change when the images do; cheap, where that is possible."""

    def open(self) -> Reading:
        """Begin to read."""


def walk(source: Source, reading: Reading, progress: Progress) -> Iterator[tuple[slice, Part]]:
    """The parts of a reading with their places among all images; too few or too many are an error."""
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
        raise InputError(f"{source.name}: {reading.count} images announced, but not so many there")
    progress.finish()


def read(source: Source, progress: Progress = SILENT) -> ImageSet:
    """All images of a source, in memory."""
    return collect(source, source.open(), progress)


def collect(source: Source, reading: Reading, progress: Progress) -> ImageSet:
    """All images of a reading, in memory."""
    images = np.empty((reading.count, *reading.shape), dtype=np.uint8)
    labels = np.empty(reading.count, dtype=np.int64)
    for part, found in walk(source, reading, progress):
        images[part], labels[part] = found
    return ImageSet(name=source.name, split=source.split, images=images, labels=labels, classes=reading.classes)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels: 110 of each to train on, the other 697 to test.

    The data set has no split of its own; this one is drawn once within each digit, by a generator whose
    stream numpy guarantees never to change.
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
        from sklearn.datasets import load_digits  # slow to import, and not needed once the images are cached

        found = load_digits()
        labels = found.target.astype(np.int64)
        images = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
        random = np.random.RandomState(0)
        train = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            train[random.permutation(np.flatnonzero(labels == label))[:110]] = True
        rows = np.flatnonzero(train if self.split == "train" else ~train)
        return Reading(len(rows), card.shape, card.classes, [(images[rows], labels[rows])])
