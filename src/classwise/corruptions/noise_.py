"""Noise corruptions: Gaussian, shot and impulse noise. They do not depend on the image size."""

# B batch, C channels, H height, W width

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from classwise.core.streams import Noise


def gaussian_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Gaussian noise of standard deviation 0.04, 0.06, 0.08, 0.09, 0.10 per pixel and channel."""
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * noise.normal(x)


def shot_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Shot noise: each value is a Poisson count, with 500, 250, 100, 75, 50 photons at full brightness."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return (poisson(x.double() * photons, photons, noise) / photons).to(x.dtype)


def impulse_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Impulse noise (salt and pepper): a share 0.01, 0.02, 0.03, 0.05, 0.07 of all values becomes 0 or 1."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    chance = noise.uniform(x)
    return torch.where(chance < share / 2, 0, torch.where(chance < share, 1, x))


NOISE = {"gaussian-noise": gaussian_noise, "shot-noise": shot_noise, "impulse-noise": impulse_noise}


def poisson(rate: Tensor, largest: int, noise: Noise) -> Tensor:
    """Return Poisson counts of rates in [0, largest] by inversion, exact to the 24 bits of a uniform number.

    A count of rate n + f, n whole, is the sum of a count of rate n, from a table, and one of rate f < 1, from a few
    terms of the series. torch.poisson does not support random streams per example.
    """
    whole = rate.floor()
    table, columns = _quantiles(largest, str(rate.device))
    # Half a step is added, as a uniform number of 24 bits may be exactly 0.
    found = torch.searchsorted(table, whole + noise.uniform(rate) + 2**-25)
    counts = (found - whole.long() * columns).to(rate.dtype)
    rest, chance = rate - whole, noise.uniform(rate) + 2**-25
    term = (-rest).exp()
    below = term.clone()
    k = 1
    while bool((above := chance > below).any()):
        counts += above
        term *= rest / k
        below += term
        k += 1
    return counts


@lru_cache(maxsize=8)
def _quantiles(largest: int, device: str) -> tuple[Tensor, int]:
    """Return the distribution functions of all whole rates as one increasing sequence, and its row length.

    The sequence has the entries n + P(count <= k), so that ``searchsorted`` for n + u finds row n and the smallest k
    with P(count <= k) >= u.
    """
    columns = largest + int(7 * math.sqrt(largest)) + 20
    rate = torch.arange(largest + 1, dtype=torch.float64)[:, None]
    count = torch.arange(columns, dtype=torch.float64)
    mass = (torch.xlogy(count, rate) - rate - torch.lgamma(count + 1)).exp()
    cumulative = mass.cumsum(1).clamp_max(1)
    cumulative[:, -1] = 1
    return (rate + cumulative).flatten().to(device), columns
