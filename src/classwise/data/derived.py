"""Data sets made of another: some classes of it, fewer examples of some, other backgrounds, or corrupted images."""

# N examples, K classes, B batch, C channels, H height, W width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.corruptions import Corruption
from classwise.data.arrays import ImageSet, release
from classwise.data.batches import to_float
from classwise.data.cache import materialise
from classwise.data.datasets import Choice, DatasetCard
from classwise.data.decode import rows_at_a_time
from classwise.data.sources import FORMAT, Reading, Source
from classwise.data.splits import draw
from classwise.storage.files import digest_json


@dataclass(frozen=True)
class Derived:
    """What a choice leaves of a data set. An imbalance is one of training: test images all stay."""

    name: str
    whole: Source
    card: DatasetCard
    choice: Choice

    @property
    def split(self) -> str:
        return self.whole.split

    def origin(self) -> str:
        return self.whole.origin()

    def fingerprint(self) -> str:
        return digest_json([FORMAT, self.whole.fingerprint(), self.split, astuple(self.choice)])

    def open(self) -> Reading:
        whole = materialise(self.whole)
        classes = whole.classes or self.card.classes
        kept = self.choice.labels(replace(self.card, classes=classes))  # files may number classes in their own way
        rows = np.flatnonzero(np.isin(whole.labels, kept))
        labels = np.searchsorted(kept, whole.labels[rows])
        if self.split == "train" and self.choice.imbalance > 1:
            thinned = long_tail(labels, len(kept), self.choice.imbalance, self.choice.seed)
            rows, labels = rows[thinned], labels[thinned]
        if not len(rows):
            raise InputError(f"{self.name} ({self.split}): no examples are left")
        channels, height, width = self.card.shape
        shape = (3 if self.choice.background else channels, height, width)
        parts = ((self.changed(*part), part[1]) for part in _parts(whole, rows, labels))
        return Reading(len(rows), shape, tuple(classes[label] for label in kept), parts)

    def changed(
        self, images: NDArray[np.uint8], labels: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """(B, C, H, W) the images of some rows of the whole, before a background and under a corruption."""
        choice = self.choice
        if not (choice.background or choice.corruption):
            return images
        x = to_float(images)
        if choice.background:
            colours = torch.tensor(choice.colours)[torch.from_numpy(labels) % len(choice.background)] / 255
            x = on_colours(x, colours)
        if choice.corruption:
            noise = ExampleNoise(choice.seed, torch.from_numpy(rows))
            x = Corruption(kind=choice.corruption, severity=choice.severity)(x, generator=noise)
        pixels: NDArray[np.uint8] = (x * 255).round().to(torch.uint8).numpy()
        return pixels


def on_colours(x: Tensor, colours: Tensor) -> Tensor:
    """(B, 3, H, W) grey images (B, 1, H, W) in white on grounds of these colours (B, 3): ink + (1 - ink) · colour."""
    return x + (1 - x) * colours[:, :, None, None]


def long_tail(labels: NDArray[np.int64], num_classes: int, imbalance: float, seed: int) -> NDArray[np.int64]:
    """Sorted indices that leave n * imbalance ** (-k / (K - 1)) examples of class k, of n in the largest class.

    The profile of Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019. Every class keeps at
    least one example, and none gets more than it has.

    >>> kept = long_tail(np.repeat([0, 1, 2], 100), 3, imbalance=100, seed=0)
    >>> np.bincount(np.repeat([0, 1, 2], 100)[kept]).tolist()
    [100, 10, 1]
    """
    largest = int(np.bincount(labels).max(initial=0))
    chosen = []
    for label in range(num_classes):
        # Rounded first, because 100 * 0.01 ** 0.5 may be a hair less than 10.
        wanted = int(round(largest * imbalance ** (-label / max(1, num_classes - 1)), 6))
        chosen.append(draw(np.flatnonzero(labels == label), max(1, wanted), seed, label))
    return np.sort(np.concatenate(chosen))


def _parts(
    whole: ImageSet, rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]]:
    """Images, labels and rows, a few at a time."""
    step = rows_at_a_time(whole.images.shape[1:])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        yield whole.images[rows[part]], labels[part], rows[part]
        release(whole.images)
