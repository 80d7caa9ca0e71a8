"""Crops, flips and random resized crops of a batch of images, from random numbers that the caller draws."""

# B batch, C channels, H height, W width

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from classwise.core.errors import InputError

SLIMMEST = 3 / 4
"""The smallest aspect ratio of a random resized crop, as width to height or height to width."""


def augment(x: Tensor, top: Tensor, left: Tensor, mirror: Tensor, crop: int) -> Tensor:
    """Crop each image from its copy padded by ``crop`` zeros, at (top, left) in 0..2*crop, then flip it if ``mirror``.

    ``top``, ``left`` and ``mirror`` (bool) are (B,). The batch is one gather without synchronization with the host.
    """
    channels, height, width = x.shape[1:]
    rows = top[:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    columns = left[:, None] + torch.where(mirror[:, None], width - 1 - columns, columns)
    positions = rows[:, :, None] * (width + 2 * crop) + columns[:, None, :]
    padded = F.pad(x, (crop, crop, crop, crop)).flatten(2)
    return padded.gather(2, positions.flatten(1)[:, None].expand(-1, channels, -1)).view_as(x)


def random_parts(draws: Tensor, smallest: float, height: int, width: int) -> Tensor:
    """Return random crops (4, B) as top, left, height, width in pixels, from draws (4, B) in [0, 1).

    The area is uniform between ``smallest`` and 1 times that of the image, the logarithm of the aspect ratio uniform
    between those of 3:4 and 4:3, and the position uniform. Sides longer than the image's are cut to it.
    """
    area = (smallest + (1 - smallest) * draws[0]) * (height * width)
    ratio = torch.exp((2 * draws[1] - 1) * -math.log(SLIMMEST))
    tall, wide = (area / ratio).sqrt().clamp(max=height), (area * ratio).sqrt().clamp(max=width)
    return torch.stack([draws[2] * (height - tall), draws[3] * (width - wide), tall, wide])


def resample(x: Tensor, parts: Tensor, mirror: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a crop (4, B) of each image by bilinear interpolation, then flip it if ``mirror``."""
    height, width = x.shape[2:]
    top, left, tall, wide = parts.to(x.dtype)
    signs = torch.where(mirror, -1.0, 1.0).to(x.dtype)
    # Affine maps of the square [-1, 1]², whose corners are the outer corners of the image.
    maps = x.new_zeros(len(x), 2, 3)
    maps[:, 0, 0], maps[:, 0, 2] = signs * wide / width, (2 * left + wide) / width - 1
    maps[:, 1, 1], maps[:, 1, 2] = tall / height, (2 * top + tall) / height - 1
    grid = F.affine_grid(maps, [len(x), x.shape[1], *size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def middle(images: np.ndarray, size: int | None) -> np.ndarray:
    """Return the center ``size`` x ``size`` pixels of images (B, C, H, W), or the whole images for None."""
    if size is None:
        return images
    height, width = images.shape[2:]
    if size > min(height, width):
        raise InputError(f"the center crop of {size} pixels is larger than the images of {height}x{width}")
    top, left = (height - size) // 2, (width - size) // 2
    return images[:, :, top : top + size, left : left + size]
