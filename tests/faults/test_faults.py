"""Faults as users meet them: invalid data, Ctrl-C, damaged files, unwritable output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app
from classwise.storage.verdicts import PENDING, Verdicts
from classwise.training.checkpoint import load_state

FACTORY = """
import torch
def data(split):
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 1, 8, 8, generator=random), torch.arange(40) % 10
    {harm}
    return x, y
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "standard"
    cw.train("digits/standard", out=out, epochs=1)
    return out


def evaluate(run: Path, data: str, out: Path) -> tuple[int, str]:
    arguments = ["evaluate", "--model", str(run), "--data", data, "--attack", "fgsm", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("y[7] = 10", "10"),
        ("y[7] = -1", "-1"),
        ("x[3, 0, 2, 2] = float('nan')", "NaN"),
        ("x = x * 255", "[0, 1]"),
        ("x = x - 0.5", "[0, 1]"),
        ("x = x.expand(-1, 3, -1, -1)", "3"),
        ("x = x[..., :3]", "8x3"),
        ("y = [str(label) for label in y]", "labels"),
        ("y = y[:10]", "10"),
        ("raise RuntimeError('the disk is on fire')", "the disk is on fire"),
    ],
)
def test_bad_data_through_the_command(run: Path, tmp_path: Path, harm: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORY.format(harm=harm))
    code, err = evaluate(run, f"{tmp_path}/mine.py:data", tmp_path / "out")
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert message in err


def test_empty_class_is_null(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY.format(harm="x, y = x[y != 4], y[y != 4]"))
    code, err = evaluate(run, f"{tmp_path}/mine.py:data", tmp_path / "out")
    assert code == 0, err
    assert cw.load_report(tmp_path / "out")["fgsm"].by_class[4].value is None
    assert "no examples" in (tmp_path / "out" / "report.html").read_text()


def test_truncated_parquet(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mirror" / "ylecun" / "mnist" / "mnist"
    folder.mkdir(parents=True)
    (folder / "test-00000-of-00001.parquet").write_bytes(b"PAR1" + bytes(100))
    monkeypatch.setenv("CLASSWISE_DATA", str(tmp_path / "mirror"))
    code, err = evaluate(run, "mnist", tmp_path / "out")
    assert code == 2
    assert "test-00000-of-00001.parquet" in err
    assert len(err.strip().splitlines()) == 1


def test_folder_with_a_file_that_is_not_an_image(run: Path, tmp_path: Path) -> None:
    for label in range(10):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        Image.new("L", (8, 8), color=20 * label).save(tmp_path / "images" / str(label) / "a.png")
    assert evaluate(run, f"folder:{tmp_path}/images", tmp_path / "good")[0] == 0
    (tmp_path / "images" / "3" / "b.png").write_bytes(b"not a picture")
    code, err = evaluate(run, f"folder:{tmp_path}/images", tmp_path / "out")
    assert (code, "b.png" in err, len(err.strip().splitlines())) == (2, True, 1)


def interrupted(arguments: list[str], appears: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and press Ctrl-C once a file appears."""
    process = subprocess.Popen(
        [sys.executable, "-m", "classwise", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not appears.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def test_ctrl_c_in_training_loses_nothing(tmp_path: Path) -> None:
    arguments = ["train", "digits/trades", "-o", "epochs=40", "--device", "cpu", "--out", str(tmp_path / "run")]
    ended = interrupted(arguments, tmp_path / "run" / "checkpoints" / "last.pt")
    assert ended.returncode == 130
    assert ended.stderr.strip().splitlines()[-1].startswith("interrupted: finished work is saved")
    assert "Traceback" not in ended.stderr
    assert 1 <= load_state(tmp_path / "run" / "checkpoints" / "last.pt")["epoch"] < 40


def test_ctrl_c_in_evaluation_loses_nothing(run: Path, tmp_path: Path) -> None:
    arguments = [
        "evaluate",
        "--model",
        str(run),
        "--data",
        "digits",
        "--attack",
        "pgd:steps=2000",
        "--batch-size",
        "10",
    ]
    arguments += ["--eps", "0.1", "--device", "cpu", "--out", str(tmp_path / "out")]
    ended = interrupted(arguments, tmp_path / "out" / "verdicts.parquet")
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    table, _ = Verdicts.load(tmp_path / "out" / "verdicts.parquet")
    assert len(table) == 697
    assert (table.natural != PENDING).all()
    assert not table.complete


def test_output_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, err = evaluate(run, "digits", tmp_path / "file" / "out")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "file" in err
    code, err = evaluate(run, "digits", tmp_path / "file")
    assert (code, "is a file, not a directory" in err) == (2, True)
