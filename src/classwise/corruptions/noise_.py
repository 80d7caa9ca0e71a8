"""Noise: sensors that warm up, count few photons, or lose bits. Nothing here has a length, so nothing is stretched."""

# B batch, C channels, H height, W width

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from classwise.core.streams import Noise


def gaussian_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Low light: normal noise on every pixel and channel, of standard deviation 0.04, 0.06, 0.08, 0.09, 0.10."""
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * noise.normal(x)


def shot_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Photons are discrete: each value is a Poisson count at full brightness 500, 250, 100, 75, 50."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return (poisson(x.double() * photons, photons, noise) / photons).to(x.dtype)


def impulse_noise(x: Tensor, severity: int, noise: Noise) -> Tensor:
    """Bit errors, salt and pepper: a share 0.01, 0.02, 0.03, 0.05, 0.07 of all values becomes 0 or 1, half each."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    chance = noise.uniform(x)
    return torch.where(chance < share / 2, 0, torch.where(chance < share, 1, x))


NOISE = {"gaussian-noise": gaussian_noise, "shot-noise": shot_noise, "impulse-noise": impulse_noise}


def poisson(rate: Tensor, largest: int, noise: Noise) -> Tensor:
    """Poisson counts of rates in [0, largest], exactly (to the 24 bits of a uniform number), by inversion.

    A count of rate n + f, n whole, is the sum of a count of rate n, looked up in a table, and one of rate f < 1,
    for which a few terms of the series are enough. Torch's own sampler knows no streams per example.
    """
    whole = rate.floor()
    table, columns = _quantiles(largest, str(rate.device))
    # Half a step up, so that the 24 bits never say exactly 0.
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
    """The distribution functions of all whole rates in one increasing sequence, n + P(count ≤ k), and its row length.

    ``searchsorted`` for n + u then finds row n and the smallest k with P(count ≤ k) ≥ u at once.
    """
    columns = largest + int(7 * math.sqrt(largest)) + 20
    rate = torch.arange(largest + 1, dtype=torch.float64)[:, None]
    count = torch.arange(columns, dtype=torch.float64)
    mass = (torch.xlogy(count, rate) - rate - torch.lgamma(count + 1)).exp()
    cumulative = mass.cumsum(1).clamp_max(1)
    cumulative[:, -1] = 1
    return (rate + cumulative).flatten().to(device), columns
