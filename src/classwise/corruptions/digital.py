"""Digital corruptions: contrast, elastic transform, pixelation and JPEG compression.

Deviations
* Elastic: one interpolation at the displaced position; the authors interpolate twice, which blurs. The random affine
  map is applied as drawn; the authors apply its inverse.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from classwise.core.streams import Noise
from classwise.corruptions.resampling import pixels, smooth, warp


def contrast(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Low contrast: differences from the mean of the channel are multiplied by 0.75, 0.5, 0.4, 0.3, 0.15."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (x - mean)


def elastic_transform(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Elastic transform: a random affine map and a random smooth displacement field; see ``displacement``."""
    rows, columns = pixels(x)
    moved = displacement(x, severity, noise)
    return warp(x, rows + moved[:, 0], columns + moved[:, 1])


def displacement(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Return the row and column offsets (B, 2, H, W) at which each pixel is sampled: an affine map plus a field.

    The affine map moves three points around the center, side / 3 from it, by up to 0.08, 0.07, 0.06, 0.05, 0.03 sides
    in each direction, and the opposite corner of the image by up to 4.2 times as much. The field is uniform noise on
    [-1, 1], smoothed by a Gaussian of sigma 0.2, 0.06, 0.04, 0.03 sides and multiplied by 0.05, 0.08, 0.1, 0.1 sides;
    severity 1 has none. The side is the shorter one. With severity the image moves less as a whole and is bent more.
    """
    shift, amplitude, sigma = (
        (0.08, 0.00, 0.00),
        (0.07, 0.05, 0.20),
        (0.06, 0.08, 0.06),
        (0.05, 0.10, 0.04),
        (0.03, 0.10, 0.03),
    )[severity - 1]
    side = min(x.shape[2:])
    first, second, third = (shift * side * (2 * noise.uniform(x.new_empty(len(x), 3, 2, 1, 1)) - 1)).unbind(1)
    down, right = ((place - place.numel() // 2) / (side // 3) for place in pixels(x))
    # An affine map interpolates the displacements of three points: (1, 1), (1, -1) and (-1, -1), in thirds of the side.
    affine = first * (1 + right) / 2 + second * (down - right) / 2 + third * (1 - down) / 2
    if amplitude == 0:
        return affine
    field = 2 * noise.uniform(x.new_empty(len(x), 2, *x.shape[2:])) - 1
    return affine + amplitude * side * smooth(field, sigma * side, int(3 * sigma * side + 0.5))


def pixelate(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Pixelation: reduced to 0.95, 0.9, 0.85, 0.75, 0.65 of its size by a box filter, then enlarged by repetition."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    return _coarsen(_coarsen(x, share).mT, share).mT.contiguous()


def jpeg_compression(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """JPEG compression by Pillow at quality 80, 65, 58, 50, 40; blocks have 8 pixels at every image size."""
    quality = (80, 65, 58, 50, 40)[severity - 1]
    images = (x * 255).round().byte().cpu().permute(0, 2, 3, 1).numpy()
    decoded = torch.from_numpy(np.stack([_through_jpeg(image, quality) for image in images]))
    return decoded.permute(0, 3, 1, 2).to(x.device, x.dtype) / 255


DIGITAL = {
    "contrast": contrast,
    "elastic-transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg-compression": jpeg_compression,
}


def _coarsen(x: Tensor, share: float) -> Tensor:
    """Replace each pixel of a row by the mean of its cell in the reduced image, with Pillow's rounding."""
    width = x.shape[-1]
    cells = int(width * share)
    edges = torch.tensor([int(cell * width / cells + 0.5) for cell in range(cells + 1)], device=x.device)
    cell = ((torch.arange(width, device=x.device) + 0.5) * cells / width).long()
    first, last = edges[cell], edges[cell + 1] - 1
    total, count = torch.zeros_like(x), (last - first + 1).to(x.dtype)
    for tap in range(math.ceil(width / cells)):
        total += torch.where(first + tap <= last, x[..., (first + tap).clamp_max(last)], 0)
    return total / count


def _through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    """Encode and decode an image (H, W, C) of bytes as JPEG."""
    file = BytesIO()
    Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).reshape(image.shape)
