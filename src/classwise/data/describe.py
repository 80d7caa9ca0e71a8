"""What a data set holds: counts of each class, channel means and deviations, and a sheet of its first images."""

# N examples, K classes, C channels

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from classwise.data.arrays import ImageSet
from classwise.data.splits import balanced_subset

ROWS = 50
"""Up to so many classes get a row of the sheet; more share a grid of one image each."""
ACROSS = 10
"""Images in a row."""
CELL = 64
"""Pixels of an image on the sheet, at most; small ones are enlarged by a whole number."""
NAME_WIDTH = 160
LINE = 14


@dataclass(frozen=True, kw_only=True)
class Description:
    """A data set in numbers."""

    counts: NDArray[np.int64]
    """(K,) examples of each class."""
    mean: tuple[float, ...]
    """(C,) of the pixels in [0, 1]."""
    std: tuple[float, ...]
    """(C,) over all pixels."""


def describe(images: ImageSet) -> Description:
    """Count and average, some images at a time."""
    num_classes = len(images.classes) if images.classes is not None else int(images.labels.max()) + 1
    channels = images.images.shape[1]
    pixels = images.images.size / channels
    scale = 255 if images.images.dtype == np.uint8 else 1
    total, squares = np.zeros(channels), np.zeros(channels)
    for _, chunk in images.chunks():
        for channel in range(channels):
            values = np.asarray(chunk[:, channel], dtype=np.float64).ravel()
            total[channel] += values.sum()
            squares[channel] += values @ values
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
    return Description(
        counts=images.counts(num_classes), mean=tuple((mean / scale).tolist()), std=tuple((std / scale).tolist())
    )


def contact_sheet(images: ImageSet, names: Sequence[str]) -> Image.Image:
    """The first images of every class: a row for each, or one image each in a grid where there are many classes.

    ``names`` are printed as they are, cut to what fits; in a grid, the labels.
    """
    few = len(names) <= ROWS
    across = ACROSS if few else math.ceil(math.sqrt(len(names)))
    first = images.take(balanced_subset(images.labels, ACROSS if few else 1, len(names)))
    side = max(images.images.shape[2:])
    cell = CELL if side >= CELL else side * max(1, CELL // side)
    left, below = (NAME_WIDTH, 0) if few else (0, LINE)
    rows = len(names) if few else math.ceil(len(names) / across)
    sheet = Image.new("RGB", (left + across * (cell + 2), rows * (cell + below + 2)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for label, name in enumerate(names):
        row, column = (label, 0) if few else divmod(label, across)
        x, y = left + column * (cell + 2), row * (cell + below + 2)
        for number, index in enumerate(np.flatnonzero(first.labels == label)):
            sheet.paste(_picture(first.images[index], cell), (x + number * (cell + 2), y))
        if few:
            draw.text((4, y + cell // 2 - LINE // 2), _fitting(name, font), fill="black", font=font)
        else:
            draw.text((x + 2, y + cell), str(label), fill="black", font=font)
    return sheet


def _picture(image: np.ndarray, cell: int) -> Image.Image:
    """An image of one, three or any other number of channels, of which the first is shown."""
    pixels = image if image.dtype == np.uint8 else (image * 255).round().astype(np.uint8)
    shown = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]
    found = Image.fromarray(np.ascontiguousarray(shown)).convert("RGB")
    scale = cell / max(found.size)
    size = (max(1, round(found.width * scale)), max(1, round(found.height * scale)))
    return found.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR)


def _fitting(name: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    if font.getlength(name) <= NAME_WIDTH - 8:
        return name
    while name and font.getlength(name + "...") > NAME_WIDTH - 8:
        name = name[:-1]
    return name + "..."
