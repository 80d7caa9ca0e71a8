"""Random numbers for attacks: from a torch generator in training, from one stream per example in evaluation.

Evaluation results must not depend on batching, on which examples are already broken, on the device, or on where an
interrupted run was resumed. Its random numbers are therefore a function of the seed, the example's index, the number of
the draw and the position: integers mixed by the splitmix64 finalizer, bit-identical on all devices.
"""

# B batch

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """Noise for a whole batch from one torch generator (None: torch's global one)."""

    generator: torch.Generator | None = None

    def uniform(self, like: Tensor) -> Tensor:
        """Draw uniformly from [0, 1), with the shape, dtype and device of a tensor."""
        return torch.rand(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def normal(self, like: Tensor) -> Tensor:
        """Draw from the standard normal distribution."""
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def take(self, rows: Tensor) -> SharedNoise:
        """Return the noise of some examples of the batch."""
        return self

    def fork(self, numbers: Sequence[int]) -> SharedNoise:
        """Return the noise of several attempts on the same examples, concatenated. Number 0 is this noise."""
        return self


@dataclass(slots=True)
class ExampleNoise:
    """Noise from one independent, reproducible stream per example."""

    seed: int
    index: Tensor
    """(B,) index of each example in its data set."""
    draws: int = field(default=0)

    def uniform(self, like: Tensor) -> Tensor:
        # A float32 in [0, 1) represents 24 bits exactly, so rounding cannot reach 1.
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
    """Noise for a subset of a batch: selected rows of the noise drawn for the whole batch from one torch generator.

    Processes that share a batch and have generators in the same state use the noise that one process would use.
    """

    generator: torch.Generator
    rows: Tensor
    """(B,) positions in the whole batch."""
    whole: int
    """Number of examples in the whole batch."""

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


Noise = SharedNoise | ExampleNoise | PartNoise
"""A source of random tensors."""
Randomness = torch.Generator | ExampleNoise | PartNoise | None
"""Source of an attack's noise: a torch generator, streams per example, a share of a batch, or torch's global state."""


def noise_of(generator: Randomness) -> Noise:
    """Return the noise of a source."""
    return generator if isinstance(generator, ExampleNoise | PartNoise) else SharedNoise(generator)


def draw(shares: Tensor, generator: Randomness) -> Tensor:
    """Draw one of K classes (B,) for every row of ``shares`` (B, K), which are proportional to probabilities."""
    noise = noise_of(generator)
    limits = shares.cumsum(1)
    point = noise.uniform(limits[:, :1]) * limits[:, -1:]
    # The first class whose limit exceeds the point, else the last one; whatever the rounding, its share is positive.
    numbers = torch.arange(shares.shape[1], device=shares.device)
    last = (numbers * (shares > 0)).amax(1, keepdim=True)
    return torch.where((limits > point) & (shares > 0), numbers, last).amin(1)


def _signed(value: int) -> int:
    """Return the low 64 bits of an integer as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    """Apply the splitmix64 finalizer to int64 tensors, whose products wrap; masks make the shifts logical."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))
