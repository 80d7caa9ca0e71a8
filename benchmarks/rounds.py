"""Measuring in rounds: everybody once a round, and each round begins with another, so that nobody has the best place.

A machine grows warm, is throttled or is shared; what changes from minute to minute then meets everybody alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from benchmarks.result import Spread
from classwise.core.errors import InputError
from classwise.core.progress import Progress

T = TypeVar("T")
M = TypeVar("M")
Clock = Callable[[], float]
"""Seconds from some moment on; it waits until the device has done what it was told."""


def interleave(
    runs: Mapping[str, Callable[[], T]],
    rounds: int,
    measure: Callable[[Callable[[], T]], M],
    progress: Progress,
) -> dict[str, list[M]]:
    """Measure everybody once in each round. Of an interrupted one the complete rounds are kept, if there are any."""
    complete: dict[str, list[M]] = {name: [] for name in runs}
    try:
        for number in range(rounds):
            found = {}
            for name in rotated(list(runs), number):
                found[name] = measure(runs[name])
                progress.advance(1, name)
            for name, value in found.items():
                complete[name].append(value)
    except KeyboardInterrupt:
        if not all(complete.values()):
            raise
    return complete


def rotated(names: Sequence[T], number: int) -> list[T]:
    """The order of a round.

    >>> rotated("abc", 0), rotated("abc", 1), rotated("abc", 5)
    (['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'])
    """
    first = number % len(names)
    return [*names[first:], *names[:first]]


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a run took, and what came of it."""

    seconds: float
    result: T


def timed(clock: Clock, run: Callable[[], T]) -> Timed[T]:
    """Time a run. What runs before it left behind is cleared away first, not at its expense."""
    gc.collect(1)  # what is young; all of it would take longer than a short run
    began = clock()
    result = run()
    return Timed(clock() - began, result)


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def spread(values: Sequence[float]) -> Spread:
    """The median with the least and the most."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values), values=list(values))


def check_rounds(rounds: int) -> None:
    """At least one."""
    if rounds < 1:
        raise InputError(f"rounds must be at least 1, got {rounds}")
