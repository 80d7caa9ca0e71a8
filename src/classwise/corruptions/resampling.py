"""Resampling images by weighted shifts, gathers and warps, mirrored or clamped at the border.

All operations are element-wise. Convolutions and matrix products are avoided because their rounding may depend on the
batch, the device and TF32 settings, and a corrupted image must not.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

REFERENCE_SIDE = 32
"""Image side, in pixels, to which the published lengths refer."""


def stretch(x: Tensor) -> float:
    """Return the factor on lengths: the shorter side relative to 32 pixels, at least 1."""
    return max(1.0, min(x.shape[-2:]) / REFERENCE_SIDE)


def gaussian(sigma: float, reach: int) -> list[float]:
    """Return Gaussian weights at -reach, ..., reach, which sum to one."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-reach, reach + 1)]
    return [weight / sum(weights) for weight in weights]


def weighted_shifts(x: Tensor, taps: Iterable[tuple[int, int, float]], reach: tuple[int, int]) -> Tensor:
    """Return the weighted sum of shifted images over taps (dy, dx, weight), with shifts of at most ``reach``."""
    (height, width), (down, right) = x.shape[-2:], reach
    padded = F.pad(x, (right, right, down, down), mode="reflect")
    total = torch.zeros_like(x)
    for dy, dx, weight in taps:
        total += weight * padded[..., down + dy : down + dy + height, right + dx : right + dx + width]
    return total


def smooth(x: Tensor, sigma: float, reach: int) -> Tensor:
    """Apply a Gaussian filter along rows and columns, cut off at ``reach`` pixels."""
    if reach == 0:
        return x
    weights = list(zip(range(-reach, reach + 1), gaussian(sigma, reach), strict=True))
    x = weighted_shifts(x, [(0, i, weight) for i, weight in weights], (0, reach))
    return weighted_shifts(x, [(i, 0, weight) for i, weight in weights], (reach, 0))


def gather_pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Replace every pixel by the one at these integer rows and columns (B, H, W), clamped to the image."""
    height, width = x.shape[-2:]
    index = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).long()
    return x.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view(x.shape)


def pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row (H, 1) and the column (1, W) of each pixel, in the dtype of the images."""
    rows, columns = (torch.arange(size, dtype=x.dtype, device=x.device) for size in x.shape[-2:])
    return rows[:, None], columns[None]


def warp(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolate at fractional rows and columns, (B, H, W) or (1, H, W), bilinearly and mirrored at the border."""
    height, width = x.shape[-2:]
    grid = torch.stack([2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1], -1)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), padding_mode="reflection", align_corners=True)


def magnify(x: Tensor, factor: float) -> Tensor:
    """Magnify about the center, keeping the size."""
    rows, columns = (place.mean() + (place - place.mean()) / factor for place in pixels(x))
    return warp(x, rows.expand(1, *x.shape[-2:]), columns.expand(1, *x.shape[-2:]))


def streak(x: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """Apply a one-sided Gaussian filter of 2 * radius pixels in direction ``angle`` (B,), in radians.

    The kernel and the rounding to whole pixels are those of ImageMagick's motion blur, which the authors use.
    """
    # Beyond five sigma weights are below 8-bit precision.
    length = int(min(2 * radius, 5 * sigma))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(length + 1)]
    rows, columns = pixels(x)
    total = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        dy, dx = ((i * direction).round()[:, None, None] for direction in (angle.sin(), angle.cos()))
        total += weight / sum(weights) * gather_pixels(x, rows + dy, columns + dx)
    return total
