"""Learning-rate schedules: pure functions of time without state, so checkpoints do not contain them.

Each is called with the time in epochs (with a fraction within an epoch) and the number of epochs, and returns the
factor of the base learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from classwise.config.spec import Number, Numbers
from classwise.core.errors import InputError


class Schedule(Protocol):
    """A function from time to learning-rate factor."""

    def __call__(self, time: float, epochs: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The base learning rate at all times."""

    def __call__(self, time: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """Multiply the learning rate by gamma every ``every`` epochs."""

    every: int = 30
    gamma: Number = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every must be at least 1 epoch, got {self.every}")
        _check_factor(self.gamma)

    def __call__(self, time: float, epochs: int) -> float:
        return self.gamma ** (int(time) // self.every)


@dataclass(frozen=True, kw_only=True)
class MultiStep(Schedule):
    """Multiply the learning rate by gamma at the start of the milestone epochs, counted from 0.

    >>> [MultiStep(milestones=(75, 90))(t, 100) for t in (74.9, 75, 90)]
    [1.0, 0.1, 0.010000000000000002]
    """

    milestones: tuple[int, ...] = (75, 90)
    gamma: Number = 0.1

    def __post_init__(self) -> None:
        _check_factor(self.gamma)

    def __call__(self, time: float, epochs: int) -> float:
        return self.gamma ** sum(time >= milestone for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 to 0, after an optional linear warm-up."""

    warmup: Number = 0.0
    """Length of the warm-up in epochs."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise InputError(f"warmup must not be negative, got {self.warmup}")

    def __call__(self, time: float, epochs: int) -> float:
        if time < self.warmup:
            return time / self.warmup
        share = (time - self.warmup) / max(epochs - self.warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


@dataclass(frozen=True, kw_only=True)
class Cyclic(Schedule):
    """One triangle: linear from 0 to the base rate at ``peak``, a fraction of training, then to 0."""

    peak: Number = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.peak < 1:
            raise InputError(f"peak must lie between 0 and 1, got {self.peak}")

    def __call__(self, time: float, epochs: int) -> float:
        share = min(time / epochs, 1.0)
        return share / self.peak if share < self.peak else (1 - share) / (1 - self.peak)


@dataclass(frozen=True, kw_only=True)
class Piecewise(Schedule):
    """Linear interpolation between the factors at the given epochs.

    >>> [Piecewise(epochs=(0, 1, 6), factors=(0.0, 1.0, 0.1))(t, 6) for t in (0.5, 1, 3.5)]
    [0.5, 1.0, 0.55]
    """

    epochs: Numbers = (0.0, 1.0)
    factors: Numbers = (1.0, 1.0)

    def __post_init__(self) -> None:
        if len(self.epochs) != len(self.factors) or not self.epochs:
            raise InputError(f"{len(self.epochs)} epochs and {len(self.factors)} factors; expected equal numbers")
        if list(self.epochs) != sorted(set(self.epochs)):
            raise InputError(f"epochs = {list(self.epochs)}; expected increasing values")
        if min(self.factors) < 0:
            raise InputError(f"factors = {list(self.factors)}; expected no negative values")

    def __call__(self, time: float, epochs: int) -> float:
        return float(np.interp(time, self.epochs, self.factors))


def _check_factor(gamma: float) -> None:
    if gamma <= 0:
        raise InputError(f"gamma must be positive, got {gamma}")


SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "step": Step,
    "multistep": MultiStep,
    "cosine": Cosine,
    "cyclic": Cyclic,
    "piecewise": Piecewise,
}
