"""How cost grows: seconds and memory of our PGD as powers of the number of images, classes, pixels and steps.

A power law is a straight line in the logarithms, so its exponent is the slope of a least-squares line through them.
Each round gives one point of each size, and the interval is that of ordinary regression: it covers the noise of the
clock, not that the law may be no power law. Batches are of one size, so memory should hardly grow with the images.
"""

# B batch, K classes, N images

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.result import GrowthBench, GrowthEntry, Slope
from benchmarks.rounds import Clock, check_rounds, clock_of, interleave, spread, timed
from benchmarks.watch import peak_memory
from classwise.attacks import PGD
from classwise.core.progress import SILENT, Progress
from classwise.storage.run_directory import hardware, versions

EPS = "8/255"
MEMORY_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Size:
    """What a run is as large as."""

    images: int = 64
    classes: int = 10
    side: int = 32
    steps: int = 5
    width: int = 16
    batch: int = 32

    def __str__(self) -> str:
        return f"{self.images} images, {self.classes} classes, side {self.side}, {self.steps} steps"


def base_of(device: torch.device) -> Size:
    """A size that keeps a device busy: a GPU that waits for work takes as long for little as for much."""
    return Size() if device.type == "cpu" else Size(images=4096, steps=10, width=64, batch=2048)


def sizes_of(base: Size) -> dict[str, list[int]]:
    """Which field is varied, over which sizes; the others stay as they are."""
    return {
        "images": [base.images * times // 2 for times in (1, 2, 4, 8)],
        "classes": [10, 100, 1000],
        "side": [16, 32, 64],
        "steps": [base.steps * times for times in (1, 2, 4, 8)],
    }


WORDS = {
    "images": "number of images",
    "classes": "number of classes",
    "side": "side of an image, pixels",
    "steps": "attack steps",
}


def bench_growth(
    device: torch.device,
    *,
    base: Size | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
    progress: Progress = SILENT,
) -> GrowthBench:
    """Measure every size of every quantity, interleaved: first the time, then the memory."""
    check_rounds(rounds)
    base = base or base_of(device)
    sizes = sizes or sizes_of(base)
    cases = {name: [replace(base, **{name: size}) for size in several] for name, several in sizes.items()}
    runs = {
        str(case): partial(attack_synthetic, case, *synthetic(case, device))
        for several in cases.values()
        for case in several
    }
    progress.start("bench growth", len(runs) * (1 + rounds + MEMORY_ROUNDS))
    try:
        interleave(runs, 1, _call, progress)
        times = interleave(runs, rounds, partial(_seconds, clock or clock_of(device)), progress)
        done = len(next(iter(times.values())))
        peaks = _peaks(runs, device, progress) if done == rounds else {}
    finally:
        progress.finish()
    return GrowthBench(
        device=str(device),
        hardware=hardware(),
        versions=versions(),
        rounds=done,
        interrupted=not peaks,
        attack=f"PGD on a random network of {base.width} channels, batches of {base.batch}",
        base=asdict(base),
        entries=[
            entry(
                name,
                sizes[name],
                [times[str(case)] for case in several],
                [peaks.get(str(case), []) for case in several],
            )
            for name, several in cases.items()
        ],
    )


def entry(
    quantity: str, sizes: Sequence[int], times: Sequence[Sequence[float]], peaks: Sequence[Sequence[int | None]]
) -> GrowthEntry:
    """The measurements of one quantity with their slopes; each size has one list of measurements."""
    known = [[peak for peak in several if peak is not None] for several in peaks]
    return GrowthEntry(
        quantity=WORDS.get(quantity, quantity),
        sizes=list(sizes),
        seconds=[spread(several) for several in times],
        peak_bytes=[spread(several) if several else None for several in known],
        time_slope=slope(sizes, times),
        memory_slope=slope(sizes, known),
    )


def slope(sizes: Sequence[float], measured: Sequence[Sequence[float]]) -> Slope | None:
    """The exponent p of measured ~ size^p with its 95% interval; None where a size has no positive measurement.

    >>> slope([10, 100], [[3.0, 3.0], [300.0, 300.0]])
    Slope(value=2.0, low=2.0, high=2.0)
    """
    if not all(several and min(several) > 0 for several in measured):
        return None
    x = np.log([size for size, several in zip(sizes, measured, strict=True) for _ in several])
    y = np.log([value for several in measured for value in several])
    if len(x) < 3:
        return None
    centred = x - x.mean()
    value = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - value * centred
    free = len(x) - 2
    half = float(stats.t.ppf(0.975, free) * np.sqrt(rest @ rest / free / (centred @ centred)))
    return Slope(value=round(value, 6), low=round(value - half, 6), high=round(value + half, 6))


def synthetic(size: Size, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A random network with so many outputs, and random images with labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, size.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(size.width, size.width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(size.width, size.classes),
        )
        x = torch.rand(size.images, 3, size.side, size.side)
        y = torch.randint(size.classes, (size.images,))
    return model.eval().to(device), x.to(device), y.to(device)


def attack_synthetic(size: Size, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Our PGD, batch by batch."""
    attack = PGD(eps=EPS, steps=size.steps, start="zero")
    return torch.cat(
        [attack(model, *some) for some in zip(torch.split(x, size.batch), torch.split(y, size.batch), strict=True)]
    )


def _peaks(
    runs: Mapping[str, Callable[[], Tensor]], device: torch.device, progress: Progress
) -> dict[str, list[int | None]]:
    """Memory in rounds of its own, which nobody times; nothing where they were interrupted."""
    try:
        return interleave(runs, MEMORY_ROUNDS, partial(_bytes, device), progress)
    except KeyboardInterrupt:
        return {}


def _bytes(device: torch.device, run: Callable[[], Tensor]) -> int | None:
    with peak_memory(device) as peak:
        run()
    return peak.bytes


def _seconds(clock: Clock, run: Callable[[], Tensor]) -> float:
    return timed(clock, run).seconds


def _call(run: Callable[[], Tensor]) -> None:
    run()
