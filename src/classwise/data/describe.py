"""Descriptions of a data set: class counts, channel means and standard deviations, and a contact sheet."""

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
"""The maximum number of classes with one row each; more are shown as a grid of one image per class."""
ACROSS = 10
"""Images per row."""
CELL = 64
"""The maximum side of an image in pixels; small images are enlarged by an integer factor."""
NAME_WIDTH = 160
LINE = 14


@dataclass(frozen=True, kw_only=True)
class Description:
    """Summary statistics of a data set."""

    counts: NDArray[np.int64]
    """The number of examples of each class, (K,)."""
    mean: tuple[float, ...]
    """The mean of each channel, (C,), for pixels in [0, 1]."""
    std: tuple[float, ...]
    """The standard deviation of each channel over all pixels, (C,)."""


def describe(images: ImageSet) -> Description:
    """Compute class counts, channel means and standard deviations, reading the images in chunks."""
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
    """Draw the first images of every class, one row per class, or one image per class in a grid for many classes.

    Rows are labeled by ``names``, shortened to fit; a grid is labeled by class numbers.
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
    """Return a scaled RGB image; unless there are three channels, only the first is shown."""
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
