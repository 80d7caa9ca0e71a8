"""Weather corruptions: snow, frost, fog and brightness.

Deviations
* Frost: the authors add crops of five photographs. Here the ice is generated: crystals are the cells of random seeds
  (Worley 1996), each with its own shade and direction of needles, slightly blue. Brightness, contrast and scale follow
  the photographs as used in CIFAR-10-C.
* Snow: for images larger than 32 pixels the flakes are generated on a grid of 32 cells and enlarged, so that snow looks
  the same at every size.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from classwise.core.streams import Noise
from classwise.corruptions.resampling import magnify, pixels, streak, stretch

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the perceived brightness of a color (ITU-R BT.601)."""


def snow(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Snow: motion-blurred flakes, added twice, the second time rotated by 180 degrees, over a whitened image.

    By severity, flakes are normal noise of mean 0.1, 0.1, 0.15, 0.25, 0.3 and standard deviation 0.2, 0.2, 0.3, 0.3,
    0.3, magnified by 1, 1, 1.75, 2.25, 1.25 and set to zero below 0.6, 0.5, 0.55, 0.6, 0.65. Streaks have radius 8, 10,
    10, 12, 14 and sigma 3, 4, 4, 6, 12, times side / 32, within 45 degrees of the vertical. The image has the weight
    0.95, 0.9, 0.9, 0.85, 0.8; the rest is max(x, 1.5 * luma + 0.5).
    """
    mean, deviation, factor, threshold, radius, sigma, kept = (
        (0.10, 0.2, 1.00, 0.60, 8, 3, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12, 0.80),
    )[severity - 1]
    cells = [round(side / stretch(x)) for side in x.shape[2:]]
    flakes = magnify(mean + deviation * noise.normal(x.new_empty(len(x), 1, *cells)), factor)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp_max(1)
    angle = -math.pi / 4 * (1 + 2 * noise.uniform(x.new_empty(len(x))))
    layer = F.interpolate(streak(flakes, angle, radius, sigma), x.shape[2:], mode="bilinear", antialias=True)
    whitened = kept * x + (1 - kept) * torch.maximum(x, 1.5 * luma(x) + 0.5)
    return whitened + layer + layer.flip(2, 3)


def frost(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Frost: the sum of 1, 1, 0.9, 0.85, 0.75 of the image and 0.2, 0.3, 0.4, 0.4, 0.45 of an image of ice.

    Beyond severity 3 there is hardly more ice but less image, which brings bright images closer to the natural ones.
    """
    kept, added = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return kept * x + added * ice(x, noise)


def fog(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Fog, a fractal f in [0, 1] of thickness t: (x + t * f) * m / (m + t), with m the brightest value of the image.

    By severity, t is 0.2, 0.5, 0.75, 1, 1.5, and the displacements of the fractal decrease by 3^2, 3^2, 2.5^2, 2^2,
    1.75^2 from one scale to the next finer one. The coarsest scale is the size of the image.
    """
    thickness, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    height, width = x.shape[2:]
    brightest = x.amax((1, 2, 3), keepdim=True)
    puffs = plasma(x, decay**2, noise)[:, None, :height, :width]
    return (x + thickness * puffs) * brightest / (brightest + thickness)


def brightness(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Brightness: the HSV value increases by 0.05, 0.1, 0.15, 0.2, 0.3, up to 1; hue and saturation are unchanged.

    As the value is the largest channel, all channels are multiplied by the same factor; black becomes gray.
    """
    value = x.amax(1, keepdim=True)
    raised = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]).clamp_max(1)
    return torch.where(value > 0, x * (raised / value), raised)


WEATHER = {"snow": snow, "frost": frost, "fog": fog, "brightness": brightness}


def luma(x: Tensor) -> Tensor:
    """Return the perceived brightness (B, 1, H, W); gray images are returned as they are."""
    if x.shape[1] == 1:
        return x
    red, green, blue = (share * x[:, i : i + 1] for i, share in enumerate(LUMA))
    return red + green + blue


def plasma(x: Tensor, decay: float, noise: Noise) -> Tensor:
    """Return fractal heights (B, S, S) from 0 to 1 by the diamond-square algorithm, S a power of two.

    Every new point is the mean of its four neighbors on the coarser, periodic grid, plus a uniform random number whose
    range is divided by ``decay`` when the grid becomes twice as fine.
    """
    size = 2 ** math.ceil(math.log2(max(x.shape[2:])))
    moves = 2 * noise.uniform(x.new_empty(len(x), size, size)) - 1
    heights = torch.zeros_like(moves)
    step, reach = size, 1.0
    while step >= 2:
        half = step // 2
        old, new = slice(0, None, step), slice(half, None, step)
        corners = heights[:, old, old]
        pairs = corners + corners.roll(-1, 1)
        heights[:, new, new] = (pairs + pairs.roll(-1, 2)) / 4 + reach * moves[:, new, new]
        middles = heights[:, new, new]
        beside = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        heights[:, old, new] = beside / 4 + reach * moves[:, old, new]
        beneath = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        heights[:, new, old] = beneath / 4 + reach * moves[:, new, old]
        step, reach = half, reach / decay
    low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return (heights - low) / (high - low)


def ice(x: Tensor, noise: Noise) -> Tensor:
    """Return images of ice (B, C, H, W), with one crystal per 5 by 5 pixels (times side / 32).

    A pixel belongs to the crystal of the nearest seed, which has a shade and a direction of needles, 2.5 pixels apart.
    Where the second nearest seed is equally near, two crystals meet in a bright rim.
    """
    unit = 5 * stretch(x)
    count = round(x.shape[2] * x.shape[3] / unit**2)
    rows, columns = (place / unit for place in pixels(x))
    seeds = noise.uniform(x.new_empty(len(x), count, 2)) * x.new_tensor(x.shape[2:]) / unit
    nearest = x.new_full((len(x), *x.shape[2:]), torch.inf)
    second, owner = nearest.clone(), torch.zeros_like(nearest, dtype=torch.long)
    for i in range(count):
        down, right = rows - seeds[:, i, 0, None, None], columns - seeds[:, i, 1, None, None]
        distance = (down * down + right * right).sqrt()
        owner = torch.where(distance < nearest, i, owner)
        second = torch.minimum(second, torch.maximum(nearest, distance))
        nearest = torch.minimum(nearest, distance)

    def of_owner(values: Tensor) -> Tensor:
        return values.gather(1, owner.flatten(1)).view(owner.shape)

    shade, turn = (of_owner(trait) for trait in noise.uniform(seeds).unbind(2))
    down, right = rows - of_owner(seeds[:, :, 0]), columns - of_owner(seeds[:, :, 1])
    along = down * (2 * math.pi * turn).sin() + right * (2 * math.pi * turn).cos()
    needles = (2 * math.pi * 2 * along).cos()
    rims = (5 * (nearest - second)).exp()
    grain = noise.uniform(nearest)
    level = 0.38 + 0.36 * noise.uniform(x.new_empty(len(x), 1, 1))
    gray = level + 0.2 * (shade - 0.5) + 0.08 * needles + 0.2 * rims + 0.15 * (grain - 0.5)
    # Ice is slightly blue in color images.
    tint = x.new_tensor((-0.05, 0.0, 0.05) if x.shape[1] == 3 else (0.0,))
    return (gray[:, None] + tint[:, None, None]).clamp(0, 1)
