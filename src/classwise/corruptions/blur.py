"""Blur corruptions: defocus, frosted glass, motion and zoom.

Deviations
* Glass: the authors' loop intends to swap two pixels but copies one onto the other, because numpy returns views. As it
  only reads pixels that it has not yet written, a sweep replaces every pixel by a random neighbor at once. The same is
  done here, including the border, which the loop skips. Offsets are drawn from {-d, ..., d-1}, as in the authors' code,
  which also moves the image by half a pixel.
* Zoom: images are magnified about their exact center. The authors crop to whole pixels first, up to half a pixel off
  the center, and this shift alone doubles the mean distance to the natural image at severity 1.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import math

from torch import Tensor

from classwise.core.streams import Noise
from classwise.corruptions.resampling import gather_pixels, magnify, pixels, smooth, streak, stretch, weighted_shifts


def defocus_blur(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Defocus blur: convolution with a disc whose edge is smoothed.

    By severity, the disc has radius 0.3, 0.4, 0.5, 1, 1.5, and the Gaussian has sigma 0.4, 0.5, 0.6, 0.2, 0.1 and is
    cut off at one pixel; all times side / 32. At 32 pixels such discs contain the centers of 1, 1, 1, 5 and 9 pixels.
    Discs with the same spread have radius 0, 0, 0, sqrt(1.6) and sqrt(8/3): they contain the same pixels and can be
    scaled.
    """
    spread, sigma = ((0.0, 0.4), (0.0, 0.5), (0.0, 0.6), (1.6, 0.2), (8 / 3, 0.1))[severity - 1]
    radius, sigma, reach = math.sqrt(spread) * stretch(x), sigma * stretch(x), max(1, round(stretch(x)))
    extent = range(-int(radius), int(radius) + 1)
    disc = [(dy, dx) for dy in extent for dx in extent if dy**2 + dx**2 <= radius**2]
    blurred = weighted_shifts(x, [(dy, dx, 1 / len(disc)) for dy, dx in disc], (int(radius), int(radius)))
    return smooth(blurred, sigma, reach)


def glass_blur(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Frosted glass blur: every pixel is replaced by a random neighbor, between two Gaussian filters.

    By severity, there are 1, 1, 1, 2, 2 sweeps with neighbors at most d = 1 pixel away, and sigma is 0.05, 0.25, 0.4,
    0.25, 0.4; sigma and d times side / 32, d rounded. The filter reduces the distance to the natural image, so its mean
    is smaller at severity 3 than at 2, and at 5 than at 4.
    """
    sigma, sweeps = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    sigma, distance = sigma * stretch(x), max(1, round(stretch(x)))
    reach = int(4 * sigma + 0.5)
    x = smooth(x, sigma, reach)
    rows, columns = pixels(x)
    for _ in range(sweeps):
        chance = noise.uniform(x.new_empty(len(x), 2, *x.shape[2:]))
        dy, dx = ((2 * distance * chance).floor() - distance).unbind(1)
        x = gather_pixels(x, rows + dy, columns + dx)
    return smooth(x, sigma, reach)


def motion_blur(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Motion blur: a one-sided Gaussian streak in a random direction within 45 degrees of the horizontal.

    By severity, sigma is 1, 1.5, 2, 2, 2.5 and the radius 6, 6, 6, 8, 9, all times side / 32. A radius of 6 already
    contains all of sigma 2, so severities 3 and 4 are equal, as in CIFAR-10-C.
    """
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    angle = (2 * noise.uniform(x.new_empty(len(x))) - 1) * math.pi / 4
    return streak(x, angle, radius * stretch(x), sigma * stretch(x))


def zoom_blur(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Zoom blur: the mean of the image and its magnifications by 1, 1.01, ..., 1.06 (1.11, 1.15, 1.20, 1.25)."""
    steps = (6, 11, 15, 20, 25)[severity - 1]
    total = x.clone()
    for step in range(steps + 1):
        total += magnify(x, 1 + step / 100)
    return total / (steps + 2)


BLUR = {"defocus-blur": defocus_blur, "glass-blur": glass_blur, "motion-blur": motion_blur, "zoom-blur": zoom_blur}
