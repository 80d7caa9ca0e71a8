"""Rounds, clocks, passes and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import measure
from benchmarks.measure import interleave, peak_memory, spread, timed

CPU = torch.device("cpu")


class HandClock:
    """A clock that is advanced by the measured work."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, *durations: float) -> Callable[[], None]:
        """Return a function whose successive calls take these durations."""
        left = iter(durations)

        def run() -> None:
            self.now += next(left)

        return run


def test_contenders_run_once_a_round_in_rotating_order() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b", "c")}
    interleave(runs, 4, lambda run: run())
    assert calls == [*"abc", *"bca", *"cab", *"abc"]


@given(st.integers(1, 6), st.integers(1, 4))
def test_contenders_have_every_position_equally_often(contenders: int, times: int) -> None:
    calls: list[int] = []
    runs = {str(one): partial(calls.append, one) for one in range(contenders)}
    interleave(runs, contenders * times, lambda run: run())
    orders = [calls[start : start + contenders] for start in range(0, len(calls), contenders)]
    for place in range(contenders):
        held = [order[place] for order in orders]
        assert [held.count(one) for one in range(contenders)] == [times] * contenders


def test_medians_by_an_injected_clock() -> None:
    clock = HandClock()
    runs = {"a": clock.work(3, 1, 2, 9), "b": clock.work(10, 40, 20, 30)}
    found = interleave(runs, 4, lambda run: timed(clock, run)[0])
    assert found == {"a": [3, 1, 2, 9], "b": [10, 40, 20, 30]}
    assert spread(found["a"]) == {"median": 2.5, "low": 1, "high": 9, "values": [3, 1, 2, 9]}
    assert spread(found["b"]) == {"median": 25, "low": 10, "high": 40, "values": [10, 40, 20, 30]}


def test_timed_returns_the_result() -> None:
    assert timed(HandClock(), lambda: "found") == (0, "found")


def test_interruption_keeps_complete_rounds() -> None:
    for breaks_at in range(1, 7):
        calls = iter(range(1, 7))

        def run(calls: Iterator[int] = calls, breaks_at: int = breaks_at) -> int:
            if (call := next(calls)) == breaks_at:
                raise KeyboardInterrupt
            return call

        runs = {"a": run, "b": run}
        if breaks_at <= 2:
            with pytest.raises(KeyboardInterrupt):
                interleave(runs, 3, lambda run: run())
        else:
            found = interleave(runs, 3, lambda run: run())
            complete = dict.fromkeys("ab", (breaks_at - 1) // 2)
            assert {name: len(values) for name, values in found.items()} == complete, breaks_at


@pytest.mark.skipif(not measure.STATM.exists(), reason="no /proc/self/statm")
def test_peak_memory_includes_freed_tensors() -> None:
    for _ in range(3):  # what the first run freed must not hide what the second takes
        with peak_memory(CPU) as peak:
            held = torch.ones(16 * 2**20)
            time.sleep(20 * measure.SAMPLE_SECONDS)
            del held
        assert peak.bytes is not None
        assert 60 * 2**20 < peak.bytes < 80 * 2**20


def test_peak_memory_is_none_without_statm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STATM", Path("/nowhere/statm"))
    with peak_memory(CPU) as peak:
        pass
    assert peak.bytes is None
