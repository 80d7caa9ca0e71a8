"""The published layout of STL-10: one binary file of images and one of labels for each split."""

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
from classwise.data.sources import Part, Reading


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
        return Reading(count, card.shape, card.classes, _parts(images, labels, card))


def _parts(images: Path, labels: Path, card: DatasetCard) -> Iterator[Part]:
    rows = rows_at_a_time(card.shape)
    both = zip(read_records(images, 3 * 96 * 96, rows), read_records(labels, 1, rows), strict=True)
    for pixels, numbers in both:
        yield pixels.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2), numbers[:, 0].astype(np.int64) - 1
