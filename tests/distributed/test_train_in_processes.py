"""``classwise train --processes``: results equal one process, nothing is lost, no process is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

CLASSWISE = [sys.executable, "-m", "classwise"]
CROP = "augment.crop=1"
SMALL = ["-o", "validation_per_class=7", "-o", "batch_size=101"]


def begin(place: Path, recipe: str, out: str, *options: str, epochs: int = 2) -> subprocess.Popen[str]:
    arguments = ["train", recipe, "--out", out, "-o", f"epochs={epochs}", *SMALL, *options]
    return subprocess.Popen(
        [*CLASSWISE, *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(place: Path, recipe: str, out: str, *options: str, epochs: int = 2) -> tuple[int, str, str]:
    process = begin(place, recipe, out, *options, epochs=epochs)
    said, complained = process.communicate(timeout=240)
    return process.returncode, said, complained


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "warmup")} for line in lines]


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"{which}.safetensors")


@pytest.mark.parametrize(
    ("recipe", "options", "processes"),
    [("digits/wat", ["-o", "clip=1"], 2), ("digits/cfol", ["-o", "ema=0.9"], 3), ("digits/awp", ["-o", CROP], 2)],
)
def test_several_processes_equal_one(tmp_path: Path, recipe: str, options: list[str], processes: int) -> None:
    """On natural images with SGD: attacks and Adam depend on signs, which near zero depend on rounding."""
    plain = ["-o", "objective=standard", "-o", "optimizer=sgd:lr=0.05"]
    for out, more in (("one", []), ("several", ["--processes", str(processes)])):
        code, _, complained = train(tmp_path, recipe, out, *plain, *options, *more)
        assert code == 0, complained
    for one, several in zip(metrics(tmp_path / "one"), metrics(tmp_path / "several"), strict=True):
        assert several["train"]["n"] == one["train"]["n"]
        assert several["validation"]["n"] == one["validation"]["n"] == [7] * 10
        assert several["lr"] == one["lr"]
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert several["validation"]["natural"] == one["validation"]["natural"]
    first, second = weights(tmp_path / "one"), weights(tmp_path / "several")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(second[name], value, atol=1e-5, rtol=1e-4), name


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    two = ["--processes", "2"]
    assert train(tmp_path, "digits/wat", "whole", *two, epochs=3)[0] == 0
    process = begin(tmp_path, "digits/wat", "cut", *two, epochs=3)
    while not (tmp_path / "cut" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, complained = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complained.strip().splitlines()[-1].startswith("interrupted: finished work is saved")
    assert "Traceback" not in complained
    assert len(metrics(tmp_path / "cut")) < 3
    assert train(tmp_path, "digits/wat", "cut", *two, "--resume", epochs=3)[0] == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for which in ("last", "best"):
        whole, cut = (weights(tmp_path / name, which) for name in ("whole", "cut"))
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
    # One run, one record of it, one line about it.
    code, said, complained = train(tmp_path, "digits/wat", "cut", *two, "--json", "--resume", epochs=3)
    assert (code, len(said.splitlines()), json.loads(said)["epochs"]) == (0, 1, 3)
    code, said, complained = train(tmp_path, "digits/wat", "cut", *two, epochs=3)
    assert (code, said, len(complained.splitlines())) == (2, "", 1)
    assert "add --resume to continue it" in complained


def test_killed_process_ends_the_others(tmp_path: Path) -> None:
    process = begin(tmp_path, "digits/wat", "run", "--processes", "2", epochs=200)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    os.kill(children[1], signal.SIGKILL)
    _, complained = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complained.splitlines()[-1] == "error: process 2 of 2 was killed by signal 9"
    assert "Traceback" not in complained
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_indivisible_batches_start_nothing(tmp_path: Path) -> None:
    for number, complaint in (
        ("4", "batch_size = 3 is too small for 4 processes"),
        ("0", "processes must be at least 1, got 0"),
    ):
        code, said, complained = train(tmp_path, "digits/wat", "run", "-o", "batch_size=3", "--processes", number)
        assert (code, said) == (2, "")
        assert complaint in complained
        assert len(complained.splitlines()) == 1
        assert not (tmp_path / "run").exists()
