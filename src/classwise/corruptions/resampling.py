"""Looking at images elsewhere: weighted shifts, gathers and warps, all mirrored or clamped at the border.

Products and sums are separate element-wise operations and no convolution or matrix product is called: their
rounding may depend on the batch, the device and on who allowed TF32, and a corrupted image must not.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

REFERENCE_SIDE = 32
"""The side for which the published lengths are meant."""


def stretch(x: Tensor) -> float:
    """What lengths are multiplied by: the shorter side relative to 32 pixels, but at least 1."""
    return max(1.0, min(x.shape[-2:]) / REFERENCE_SIDE)


def gaussian(sigma: float, reach: int) -> list[float]:
    """Weights at -reach .. reach, summing to one."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-reach, reach + 1)]
    return [weight / sum(weights) for weight in weights]


def weighted_shifts(x: Tensor, taps: Iterable[tuple[int, int, float]], reach: tuple[int, int]) -> Tensor:
    """The sum of weight · (x moved by (dy, dx)) over the taps (dy, dx, weight), no shift longer than ``reach``."""
    (height, width), (down, right) = x.shape[-2:], reach
    padded = F.pad(x, (right, right, down, down), mode="reflect")
    total = torch.zeros_like(x)
    for dy, dx, weight in taps:
        total += weight * padded[..., down + dy : down + dy + height, right + dx : right + dx + width]
    return total


def smooth(x: Tensor, sigma: float, reach: int) -> Tensor:
    """A Gaussian filter along rows and columns, cut off at ``reach`` pixels."""
    if reach == 0:
        return x
    weights = list(zip(range(-reach, reach + 1), gaussian(sigma, reach), strict=True))
    x = weighted_shifts(x, [(0, i, weight) for i, weight in weights], (0, reach))
    return weighted_shifts(x, [(i, 0, weight) for i, weight in weights], (reach, 0))


def look(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Every pixel replaced by the one at these whole (B, H, W) rows and columns, clamped to the image."""
    height, width = x.shape[-2:]
    index = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).long()
    return x.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view(x.shape)


def pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row (H, 1) and the column (1, W) of each pixel, in the type of the images."""
    rows, columns = (torch.arange(size, dtype=x.dtype, device=x.device) for size in x.shape[-2:])
    return rows[:, None], columns[None]


def warp(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear interpolation at fractional rows and columns, (B, H, W) or (1, H, W), mirrored at the border."""
    height, width = x.shape[-2:]
    grid = torch.stack([2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1], -1)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), padding_mode="reflection", align_corners=True)


def magnify(x: Tensor, factor: float) -> Tensor:
    """Zoomed in about the centre, at the same size."""
    rows, columns = (place.mean() + (place - place.mean()) / factor for place in pixels(x))
    return warp(x, rows.expand(1, *x.shape[-2:]), columns.expand(1, *x.shape[-2:]))


def streak(x: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """Dragged along a line: a one-sided Gaussian of 2 · radius pixels towards ``angle`` (B,), in radians.

    The kernel and the rounding to whole pixels are those of ImageMagick's motion blur, which the authors call.
    """
    # Beyond five sigma a weight is too small for eight bits.
    length = int(min(2 * radius, 5 * sigma))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(length + 1)]
    rows, columns = pixels(x)
    total = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        dy, dx = ((i * direction).round()[:, None, None] for direction in (angle.sin(), angle.cos()))
        total += weight / sum(weights) * look(x, rows + dy, columns + dx)
    return total
