"""Time in interleaved rounds, passes through a model, and peak memory.

Every contender runs once per round, and each round begins with the next contender, so that changes of a machine over
time affect all contenders equally.
"""

# B batch

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from classwise.core.errors import InputError, one_line
from classwise.core.pass_counter import Passes, count_passes
from classwise.core.progress import SILENT, Progress

T = TypeVar("T")
M = TypeVar("M")
Clock = Callable[[], float]
"""Returns seconds, after the device has finished its work."""
SAMPLE_SECONDS = 0.002
"""Time between two readings of the resident memory."""
STATM = Path("/proc/self/statm")


@dataclass(slots=True)
class Peak:
    """Peak memory in bytes above the memory in use before; None if unknown."""

    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Generic[M]):
    """Measurements of a contender: the warm-up round, and the seconds of every complete round after it."""

    result: M
    warm_up: float
    passes: Passes
    peak_bytes: int | None
    seconds: list[float] = field(default_factory=list)


def compete(
    runs: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    device: torch.device,
    check: Callable[[T], M],
    modules: Mapping[str, Sequence[nn.Module]] | None = None,
    optional: Collection[str] = (),
    clock: Clock | None = None,
    task: str = "bench",
    progress: Progress = SILENT,
) -> tuple[dict[str, Measured[M]], list[str]]:
    """Measure contenders by a warm-up round and ``rounds`` timed ones.

    The warm-up round counts the passes through ``modules`` and the memory, and ``check`` reads its result. A contender
    in ``optional`` that fails in it is left out; the second return value has one line for each.
    """
    check_rounds(rounds)
    clock = clock or clock_of(device)
    notes: list[str] = []

    def warm_up(name: str) -> Measured[M] | None:
        try:
            with peak_memory(device) as peak, count_passes(*(modules or {}).get(name, ())) as passes:
                seconds, result = timed(clock, runs[name])
            return Measured(result=check(result), warm_up=seconds, passes=passes, peak_bytes=peak.bytes)
        except Exception as error:  # third-party code may raise anything
            if name not in optional:
                raise
            notes.append(f"{name} is left out: {one_line(error, 120)}")
            return None

    progress.start(task, len(runs) * (rounds + 1))
    try:
        first = interleave({name: partial(warm_up, name) for name in runs}, 1, lambda run: run(), progress)
        found = {name: one for name, (one,) in first.items() if one is not None}
        timings = interleave({name: runs[name] for name in found}, rounds, lambda run: timed(clock, run)[0], progress)
    finally:
        progress.finish()
    for name, seconds in timings.items():
        found[name].seconds.extend(seconds)
    return found, notes


def interleave(
    runs: Mapping[str, Callable[[], T]],
    rounds: int,
    measure: Callable[[Callable[[], T]], M],
    progress: Progress = SILENT,
) -> dict[str, list[M]]:
    """Measure every run once a round. An interruption keeps the complete rounds and is raised if there are none."""
    complete: dict[str, list[M]] = {name: [] for name in runs}
    names = list(runs)
    try:
        for number in range(rounds):
            first = number % len(names)
            found = {}
            for name in [*names[first:], *names[:first]]:
                found[name] = measure(runs[name])
                progress.advance(1, name)
            for name, value in found.items():
                complete[name].append(value)
    except KeyboardInterrupt:
        if not all(complete.values()):
            raise
    return complete


def timed(clock: Clock, run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds and result of a run, after collecting the young garbage of the previous run."""
    gc.collect(1)
    began = clock()
    result = run()
    return clock() - began, result


def clock_of(device: torch.device) -> Clock:
    """Return the clock for work on a device."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, minimum and maximum of several measurements, and all of them in order."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "values": list(values)}


def check_rounds(rounds: int) -> None:
    """Require at least one round."""
    if rounds < 1:
        raise InputError(f"rounds must be at least 1, got {rounds}")


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the growth of memory: memory allocated by torch on a GPU, else the resident memory of this process.

    Resident memory is read every two milliseconds by a thread, where the system has ``/proc/self/statm``.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    if not STATM.exists():
        yield peak
        return
    with suppress(AttributeError, OSError, TypeError):  # glibc only; freed but unreturned memory would hide the growth
        ctypes.CDLL(None).malloc_trim(0)
    before = highest = _resident_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_SECONDS):
            highest = max(highest, _resident_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
    peak.bytes = max(highest, _resident_bytes()) - before


def _resident_bytes() -> int:
    """Return the resident bytes without pages of files, because library code is not memory used by a run."""
    resident, shared = map(int, STATM.read_text(encoding="ascii").split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
