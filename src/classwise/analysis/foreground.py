"""Foreground masks estimated from colors, for images without annotated masks.

Similar to GrabCut without its graph cut: pixels near the border initialize the background and pixels in the middle the
foreground. Two Gaussian mixtures are fitted to their colors, each pixel is assigned to the likelier one after smoothing
over its neighbors, and the fit is repeated. The result is the largest connected part with its holes filled.
"""

# N images, C channels, H height, W width

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

Masks = NDArray[np.bool_]
ROUNDS = 3
SURE = 2.0
"""Limit of the log-odds, so that no pixel outweighs its neighbors."""
COMPONENTS = 2
"""Number of Gaussians in each mixture."""
LEAST = 8
"""Minimum number of pixels of a fit."""


def foregrounds(images: NDArray[np.floating]) -> Masks:
    """Return (N, H, W) the foreground masks of images (N, C, H, W)."""
    return np.array([_foreground(image) for image in images], dtype=bool).reshape(len(images), *images.shape[2:])


def _foreground(image: NDArray[np.floating]) -> Masks:
    channels, height, width = image.shape
    colors = image.reshape(channels, -1).T.astype(np.float64)
    rows, columns = np.mgrid[:height, :width]
    edge = np.minimum.reduce([rows, columns, height - 1 - rows, width - 1 - columns]).ravel()
    foreground = edge >= max(1, min(height, width) // 4)
    background = edge < max(1, min(height, width) // 8)
    mask = foreground
    for _ in range(ROUNDS):
        if foreground.sum() < LEAST or background.sum() < LEAST:
            break
        odds = _likelihood(colors, foreground) - _likelihood(colors, background)
        smooth = ndimage.gaussian_filter(np.clip(odds, -SURE, SURE).reshape(height, width), 0.7)
        mask = (smooth > 0).ravel()
        foreground, background = mask, ~mask
    return _largest_part(mask.reshape(height, width))


def _likelihood(colors: NDArray[np.float64], pixels: Masks) -> NDArray[np.float64]:
    mixture = GaussianMixture(COMPONENTS, covariance_type="full", reg_covar=1e-3, max_iter=20, n_init=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # expected for images with few colors
        return np.asarray(mixture.fit(colors[pixels]).score_samples(colors))


def _largest_part(mask: Masks) -> Masks:
    parts, number = ndimage.label(mask)
    if number == 0:
        return mask
    sizes = ndimage.sum_labels(mask, parts, range(1, number + 1))
    return np.asarray(ndimage.binary_fill_holes(parts == 1 + int(np.argmax(sizes))))
