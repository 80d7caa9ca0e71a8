"""Growth: exponents are recovered, and their 95% intervals cover 95%."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.growth import Size, base_of, bench_growth, entry, sizes_of, slope


@settings(max_examples=30)
@given(st.floats(-1, 3), st.floats(1e-6, 1e3), st.lists(st.integers(1, 10_000), min_size=3, max_size=6, unique=True))
def test_an_exact_power_law_is_recovered(exponent: float, factor: float, sizes: list[int]) -> None:
    found = slope(sizes, [[factor * size**exponent] * 2 for size in sizes])
    assert found is not None
    assert found["value"] == pytest.approx(exponent, abs=1e-5)
    assert found["low"] == pytest.approx(exponent, abs=1e-4)
    assert found["high"] == pytest.approx(exponent, abs=1e-4)


def test_the_interval_covers_the_true_exponent_in_95_of_100_cases() -> None:
    random = np.random.default_rng(0)
    sizes, exponent, times = [16, 32, 64], 2.0, 600
    covered = 0
    for _ in range(times):
        noisy = [[3e-4 * size**exponent * np.exp(0.1 * random.normal()) for _ in range(5)] for size in sizes]
        found = slope(sizes, noisy)
        assert found is not None
        covered += found["low"] <= exponent <= found["high"]
    assert abs(covered / times - 0.95) < 4 * (0.95 * 0.05 / times) ** 0.5


def test_no_slope_without_points() -> None:
    assert slope([1, 2], [[1.0, 1.0], []]) is None  # nothing measured
    assert slope([1, 2], [[1.0, 2.0], [0.0, 3.0]]) is None  # a zero has no logarithm
    assert slope([1, 2], [[1.0], [2.0]]) is None  # two points have no spread


def test_unknown_memory_stays_none() -> None:
    found = entry("steps", [1, 2], [[1.0, 1.0, 1.2], [2.0, 2.2, 1.9]], [[None, None], [None, None]])
    assert (found["memory_slope"], found["peak_bytes"]) == (None, [None, None])
    assert [one["median"] for one in found["seconds"]] == [1.0, 2.0]
    assert found["time_slope"] is not None


def test_every_size_is_run_and_time_is_fitted() -> None:
    """The clock counts passes of the network, so time is exactly images times steps."""
    passes = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal passes
        if isinstance(module, torch.nn.Flatten):  # once in each pass of the network
            passes += len(inputs[0])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        found = bench_growth(
            torch.device("cpu"),
            sizes={"images": (2, 4, 40), "classes": (3, 30), "side": (4, 8), "steps": (1, 2, 4)},
            base=Size(images=4, classes=3, side=8, steps=2),
            rounds=2,
            clock=lambda: float(passes),
        )
    finally:
        handle.remove()
    images, classes, side, steps = found.content["entries"]
    assert [one["median"] for one in images["seconds"]] == [4, 8, 80]
    assert [one["median"] for one in steps["seconds"]] == [4, 8, 16]
    slopes = [one["time_slope"]["value"] for one in (images, classes, side, steps)]
    assert slopes == pytest.approx([1, 0, 0, 1], abs=1e-6)
    assert (found.content["rounds"], found.content["interrupted"]) == (2, False)
    assert classes["sizes"] == [3, 30]
    assert side["sizes"] == [4, 8]


def test_varied_quantities_are_fields_of_a_size() -> None:
    for base in (base_of(torch.device("cpu")), base_of(torch.device("cuda"))):
        sizes = sizes_of(base)
        assert set(sizes) == {"images", "classes", "side", "steps"}
        assert all(getattr(base, name) in several for name, several in sizes.items())
        assert base.images // 2 >= base.batch  # memory is that of a full batch
