"""Randomness for attacks: from a torch generator in training, from one stream per example in evaluation.

An evaluation must not depend on how examples are batched, on which were dropped as broken, on the device, or on
where an interrupted run was taken up. So its random numbers are a function of the seed, the example's index, the
draw and the position alone: integers mixed by the splitmix64 finaliser, bit for bit the same on every device.
"""

# B batch

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


class Noise(Protocol):
    """Random tensors in the shape, dtype and device of another."""

    def uniform(self, like: Tensor) -> Tensor:
        """Uniform in [0, 1)."""

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal."""

    def take(self, rows: Tensor) -> Noise:
        """The noise of some examples of the batch."""

    def fork(self, numbers: Sequence[int]) -> Noise:
        """The noise of several attempts at the same examples, one after the other in a batch. Number 0 is this one."""


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """Draws for a whole batch from one torch generator (None: torch's global one)."""

    generator: torch.Generator | None = None

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def take(self, rows: Tensor) -> SharedNoise:
        return self

    def fork(self, numbers: Sequence[int]) -> SharedNoise:
        return self


@dataclass(slots=True)
class ExampleNoise:
    """One independent, reproducible stream for every example."""

    seed: int
    index: Tensor
    """(B,) identity of each example, the same in every run."""
    draws: int = field(default=0)

    def uniform(self, like: Tensor) -> Tensor:
        # 24 bits are what a float32 in [0, 1) holds exactly, so no rounding can reach 1.
        return ((self._bits(like) >> 8) & 0xFFFFFF).to(like.dtype) / 2**24

    def normal(self, like: Tensor) -> Tensor:
        # Box-Muller; 1 - u lies in (0, 1], so its logarithm is finite.
        radius = (-2 * (1 - self.uniform(like)).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(like)).cos()

    def take(self, rows: Tensor) -> ExampleNoise:
        return ExampleNoise(self.seed, self.index[rows.to(self.index.device)], self.draws)

    def fork(self, numbers: Sequence[int]) -> ExampleNoise:
        parts = [_mix(self.index + _signed(n * 0xA0761D6478BD642F)) if n else self.index for n in numbers]
        return ExampleNoise(self.seed, torch.cat(parts), self.draws)

    def _bits(self, like: Tensor) -> Tensor:
        index = self.index.to(like.device)
        stream = _mix(_mix(index + _signed(self.seed * 0x9E3779B97F4A7C15)) + self.draws)
        self.draws += 1
        positions = torch.arange(like[0].numel(), device=like.device)
        return _mix(stream[:, None] + positions * _signed(0xD1342543DE82EF95)).view(like.shape)


@dataclass(frozen=True, slots=True)
class PartNoise:
    """Draws for a whole batch from one torch generator, and keeps some rows.

    Processes that share a batch, with generators in one state, so have the noise that one process would have had.
    """

    generator: torch.Generator
    rows: Tensor
    """(B,) places in the whole batch."""
    whole: int
    """Examples in the whole batch."""

    def uniform(self, like: Tensor) -> Tensor:
        return SharedNoise(self.generator).uniform(self._whole(like))[self.rows]

    def normal(self, like: Tensor) -> Tensor:
        return SharedNoise(self.generator).normal(self._whole(like))[self.rows]

    def take(self, rows: Tensor) -> PartNoise:
        return replace(self, rows=self.rows[rows])

    def fork(self, numbers: Sequence[int]) -> PartNoise:
        rows = torch.cat([self.rows + place * self.whole for place in range(len(numbers))])
        return PartNoise(self.generator, rows, self.whole * len(numbers))

    def _whole(self, like: Tensor) -> Tensor:
        return like.new_empty(self.whole, *like.shape[1:])


Randomness = torch.Generator | ExampleNoise | PartNoise | None
"""What may drive an attack: a torch generator, one stream per example, a part of a batch, or torch's global state."""


def noise_of(generator: Randomness) -> Noise:
    """The noise that something random makes."""
    return generator if isinstance(generator, ExampleNoise | PartNoise) else SharedNoise(generator)


def draw(shares: Tensor, generator: Randomness) -> Tensor:
    """(B,) one of K for every row of shares (B, K)."""
    noise = noise_of(generator)
    limits = shares.cumsum(1)
    place = noise.uniform(limits[:, :1]) * limits[:, -1:]
    # The first beyond the place, or the last of all. However sums are rounded, it must be one that has a share.
    numbers = torch.arange(shares.shape[1], device=shares.device)
    last = (numbers * (shares > 0)).amax(1, keepdim=True)
    return torch.where((limits > place) & (shares > 0), numbers, last).amin(1)


def _signed(value: int) -> int:
    """The low 64 bits of an integer, read as signed."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors, whose products wrap; shifts are made logical by a mask."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))
