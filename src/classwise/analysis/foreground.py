"""What in an image is the thing and what is behind it: an estimate by colours, for those who have no masks.

In the manner of GrabCut, without its graph cut: the colours near the border are taken for those of the background,
those of the middle for those of the thing; two mixtures of Gaussians are fitted, every pixel goes to the likelier,
smoothed over its neighbours, and the two are fitted anew, a few times. What is left over are the largest connected part
and its holes.
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
"""Log odds beyond which a pixel is no surer: else it would speak for its neighbours."""
COLOURS = 2
"""Gaussians on either side."""
LEAST = 8
"""Pixels on either side, without which its colours are not fitted anew."""


def foregrounds(images: NDArray[np.floating]) -> Masks:
    """(N, H, W) which pixels of the images (N, C, H, W) belong to the thing in the middle."""
    return np.array([_foreground(image) for image in images], dtype=bool).reshape(len(images), *images.shape[2:])


def _foreground(image: NDArray[np.floating]) -> Masks:
    channels, height, width = image.shape
    colours = image.reshape(channels, -1).T.astype(np.float64)
    rows, columns = np.mgrid[:height, :width]
    edge = np.minimum.reduce([rows, columns, height - 1 - rows, width - 1 - columns]).ravel()
    inside = edge >= max(1, min(height, width) // 4)
    behind = edge < max(1, min(height, width) // 8)
    mask = inside
    for _ in range(ROUNDS):
        if inside.sum() < LEAST or behind.sum() < LEAST:
            break
        odds = _likelihood(colours, inside) - _likelihood(colours, behind)
        smooth = ndimage.gaussian_filter(np.clip(odds, -SURE, SURE).reshape(height, width), 0.7)
        mask = (smooth > 0).ravel()
        inside, behind = mask, ~mask
    return _one_piece(mask.reshape(height, width))


def _likelihood(colours: NDArray[np.float64], among: Masks) -> NDArray[np.float64]:
    mixture = GaussianMixture(COLOURS, covariance_type="full", reg_covar=1e-3, max_iter=20, n_init=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of few colours, or one, it is as good as it gets
        return np.asarray(mixture.fit(colours[among]).score_samples(colours))


def _one_piece(mask: Masks) -> Masks:
    parts, number = ndimage.label(mask)
    if number == 0:
        return mask
    sizes = ndimage.sum_labels(mask, parts, range(1, number + 1))
    return np.asarray(ndimage.binary_fill_holes(parts == 1 + int(np.argmax(sizes))))
