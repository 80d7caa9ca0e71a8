"""Jobs in worker processes: results, messages, and termination."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from classwise.core.errors import Diverged, InputError
from classwise.training.workers import Send, run_jobs

LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes where Linux shows them")


def square(number: int, send: Send) -> int:
    send(("began", number))
    time.sleep(0.2 if number == 1 else 0.0)
    send(("did", number))
    return number**2


def diverge(number: int, send: Send) -> int:
    if number < 2:
        raise Diverged(f"number {number}")
    send(number)
    return number


def refuse(number: int, send: Send) -> int:
    if number == 0:
        raise InputError("not this")
    time.sleep(60)
    return number


def where(_: int, send: Send) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def nap(seconds: float, send: Send) -> None:
    send("began")
    time.sleep(seconds)


def test_results_are_ordered_and_messages_received() -> None:
    heard: list[tuple[str, int]] = []
    assert run_jobs(2, square, [1, 2, 3], heard.append) == [1, 4, 9]
    assert sorted(heard) == [(what, number) for what in ("began", "did") for number in (1, 2, 3)]
    assert all(heard.index(("began", number)) < heard.index(("did", number)) for number in (1, 2, 3))


def test_diverged_job_is_raised_after_the_others_finish() -> None:
    heard: list[int] = []
    with pytest.raises(Diverged, match="number 0"):
        run_jobs(2, diverge, [0, 1, 2, 3], heard.append)
    assert sorted(heard) == [2, 3]


def test_other_errors_end_all_jobs() -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match="not this"):
        run_jobs(2, refuse, [0, 1, 2, 3])
    assert time.monotonic() - began < 50


def test_workers_are_processes_that_share_the_cores() -> None:
    (first, threads), (second, _) = run_jobs(2, where, [0, 1])
    assert os.getpid() not in (first, second)
    assert threads == max(1, (os.cpu_count() or 1) // 2)


def test_zero_workers_raise() -> None:
    with pytest.raises(InputError, match="workers = 0: expected at least 1"):
        run_jobs(0, square, [1])


@LINUX
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(blow: signal.Signals) -> None:
    """Workers keep the output of their parent open while they live."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    process.send_signal(blow)
    out, err = process.communicate(timeout=50)
    assert set(out.split()) <= {"began"}
    assert err.count("Traceback") == (blow == signal.SIGINT)  # the output of the program itself, and none of a worker
    assert process.returncode != 0


if __name__ == "__main__":
    run_jobs(2, nap, [60, 60], lambda said: print(said, flush=True))
