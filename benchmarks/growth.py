"""Growth of cost: seconds and memory of our PGD as powers of the number of images, classes, pixels and steps.

The exponent of a power law is the slope of a least-squares line through the logarithms, with the 95% interval of
ordinary regression: it covers the noise of the clock, not a deviation from the law. The batch size is fixed, so memory
should hardly grow with the number of images.
"""

# B batch, K classes, N images

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.measure import Clock, compete, interleave, peak_memory, spread
from benchmarks.result import Bench, circumstances, memory, protocol, seconds, table
from classwise.attacks import PGD
from classwise.core.progress import SILENT, Progress

EPS = "8/255"
MEMORY_ROUNDS = 3
"""Memory is measured in separate rounds, because reading it takes time."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of one measured run."""

    images: int = 64
    classes: int = 10
    side: int = 32
    steps: int = 5
    width: int = 16
    batch: int = 32

    def __str__(self) -> str:
        return f"{self.images} images, {self.classes} classes, side {self.side}, {self.steps} steps"


def base_of(device: torch.device) -> Size:
    """Return a size that keeps the device busy; on an idle GPU, small and large runs take equally long."""
    return Size() if device.type == "cpu" else Size(images=4096, steps=10, width=64, batch=2048)


def sizes_of(base: Size) -> dict[str, list[int]]:
    """Return the values of each field that is varied while the others are fixed."""
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
) -> Bench:
    """Measure every size of every quantity, interleaved: first the time, then the memory."""
    base = base or base_of(device)
    sizes = sizes or sizes_of(base)
    cases = {name: [replace(base, **{name: size}) for size in several] for name, several in sizes.items()}
    runs = {
        str(case): partial(attack_synthetic, case, *synthetic(case, device))
        for several in cases.values()
        for case in several
    }
    measured, _ = compete(
        runs, rounds, device=device, check=lambda found: None, clock=clock, task="bench growth", progress=progress
    )
    done = len(next(iter(measured.values())).seconds)
    peaks = _peaks(runs, device) if done == rounds else {}
    content = {
        **circumstances("growth", device, done, not peaks, []),
        "attack": f"PGD on a random network of {base.width} channels, batches of {base.batch}",
        "base": asdict(base),
        "entries": [
            entry(
                name,
                sizes[name],
                [measured[str(case)].seconds for case in several],
                [peaks.get(str(case), []) for case in several],
            )
            for name, several in cases.items()
        ],
    }
    return present(content)


def entry(
    quantity: str, sizes: Sequence[int], times: Sequence[Sequence[float]], peaks: Sequence[Sequence[int | None]]
) -> dict[str, Any]:
    """Return the measurements of one quantity with their slopes; each size has one list of measurements."""
    known = [[peak for peak in several if peak is not None] for several in peaks]
    return {
        "quantity": WORDS.get(quantity, quantity),
        "sizes": list(sizes),
        "seconds": [spread(several) for several in times],
        "peak_bytes": [spread(several) if several else None for several in known],
        "time_slope": slope(sizes, times),
        "memory_slope": slope(sizes, known),
    }


def slope(sizes: Sequence[float], measured: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Return the exponent p of measured ~ size^p with its 95% interval; None if a size has no positive measurement.

    >>> slope([10, 100], [[3.0, 3.0], [300.0, 300.0]])
    {'value': 2.0, 'low': 2.0, 'high': 2.0}
    """
    points = [(size, value) for size, several in zip(sizes, measured, strict=True) for value in several]
    if len(points) < 3 or not all(several and min(several) > 0 for several in measured):
        return None
    line = stats.linregress(*np.log(points).T)
    half = float(stats.t.ppf(0.975, len(points) - 2) * np.nan_to_num(line.stderr))  # nan if all values are equal
    value = float(line.slope)
    return {"value": round(value, 6), "low": round(value - half, 6), "high": round(value + half, 6)}


def present(content: dict[str, Any]) -> Bench:
    """Return the table and bars of a benchmark of growth."""
    base = ", ".join(f"{name} {size}" for name, size in content["base"].items())
    rows = [
        [
            one["quantity"],
            ", ".join(map(str, one["sizes"])),
            ", ".join(seconds(found["median"]) for found in one["seconds"]),
            _slope(one["time_slope"]),
            ", ".join(memory(found and found["median"]) for found in one["peak_bytes"]),
            _slope(one["memory_slope"]),
        ]
        for one in content["entries"]
    ]
    columns = ["quantity", "sizes", "seconds", "time ~ size^ [95%]", "peak memory", "memory ~ size^ [95%]"]
    about = f"{content['attack']}; values not varied: {base}; {protocol(content)}"
    bars = {
        f"{one['quantity']}: time grows as size^{_slope(one['time_slope'])}": {
            str(size): found for size, found in zip(one["sizes"], one["seconds"], strict=True)
        }
        for one in content["entries"]
    }
    return Bench(content=content, tables=[table("growth of cost", about, columns, rows)], bars=bars)


def _slope(found: dict[str, float] | None) -> str:
    """Format a slope with its interval; adding 0.0 turns -0.0 into 0.0."""
    if found is None:
        return "–"
    value, low, high = (f"{round(found[key], 2) + 0.0:.2f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def synthetic(size: Size, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a random network, and random images with labels."""
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
    """Run our PGD batch by batch."""
    attack = PGD(eps=EPS, steps=size.steps, start="zero")
    return torch.cat(
        [attack(model, *some) for some in zip(torch.split(x, size.batch), torch.split(y, size.batch), strict=True)]
    )


def _peaks(runs: Mapping[str, Callable[[], Tensor]], device: torch.device) -> dict[str, list[int | None]]:
    """Return the peak memory of every run; nothing if interrupted in the first round."""

    def peak_of(run: Callable[[], Tensor]) -> int | None:
        with peak_memory(device) as peak:
            run()
        return peak.bytes

    try:
        return interleave(runs, MEMORY_ROUNDS, peak_of)
    except KeyboardInterrupt:
        return {}
