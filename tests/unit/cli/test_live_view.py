"""Progress of training: on a terminal of any width, without a terminal, and after Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from classwise.cli import console
from classwise.cli.live_view import WEAKEST, EpochLines, LiveView, fitted, sparkline, weakest
from classwise.core.progress import Epoch
from classwise.data import load_data

CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"


def make_epoch(
    classes: list[str], values: list[float | None], *, run: str = "run", epoch: int = 3, measured: bool = True
) -> Epoch:
    """Robust accuracies, or none."""
    known = [(value, label) for label, value in enumerate(values) if value is not None]
    value, label = min(known, default=(0.0, 0))
    robust = {"overall": 41.25, "by_class": values, "worst": {"label": label, "value": value}}
    validation = {"natural": {"overall": 81.5}, "robust": robust} if measured else {"natural": None, "robust": None}
    record = {"epoch": epoch, "loss": 1.2345, "lr": 0.1, "validation": validation}
    return Epoch(run=Path("somewhere") / run, epochs=30, classes=classes, history=[record])


def drawn(epochs: list[Epoch], width: int, *, encoding: str = "utf-8") -> list[str]:
    """Return the lines for a terminal of this width."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    Console(file=file, width=width, color_system=None).print(EpochLines(epochs))
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def test_one_run_shows_its_numbers_and_its_weakest_classes() -> None:
    lines = drawn([make_epoch(["airplane", "cat", "dog"], [80.0, 12.5, None])], 80)
    assert lines == [
        "epoch 3/30  loss 1.234  natural 81.5  robust 41.2  worst class cat at 12.5",
        "cat      █         12.5  airplane ██████▍   80.0",
    ]


def test_several_runs_have_one_line_each() -> None:
    epochs = [
        make_epoch(["airplane", "cat", "dog"], [80.0, 12.5, 99.0], run="seed-0"),
        make_epoch(["airplane", "cat", "dog"], [70.0, 50.5, None], run="seed-10", epoch=2),
    ]
    assert drawn(epochs, 100) == [
        "seed-0   epoch 3/30  loss 1.234  natural 81.5  robust 41.2  worst class cat at 12.5  ▇▂█",
        "seed-10  epoch 2/30  loss 1.234  natural 81.5  robust 41.2  worst class cat at 50.5  ▆▅",
    ]
    assert drawn(epochs, 40) == [
        "seed-0   worst class cat at 12.5  ▇▂█",
        "seed-10  worst class cat at 50.5  ▆▅",
    ]
    assert drawn(epochs, 48) == [
        "seed-0   epoch 3/30  worst class cat at 12.5",
        "seed-10  epoch 2/30  worst class cat at 50.5",
    ]


def test_without_validation_the_loss_is_shown() -> None:
    assert drawn([make_epoch(["cat"], [None], measured=False)], 80) == ["epoch 3/30  loss 1.234"]


def test_many_classes_show_the_weakest() -> None:
    values: list[float | None] = [float(value) for value in range(1000)]
    epoch = make_epoch([f"class {label}" for label in range(1000)], values[::-1])
    assert weakest(epoch) == [(f"class {999 - rank}", float(rank)) for rank in range(WEAKEST)]
    lines = drawn([epoch], 80)
    assert sum(line.count("class ") for line in lines[1:]) == WEAKEST
    assert len(lines) <= 1 + WEAKEST
    assert len(drawn([epoch, epoch], 200)[0]) < 120


def test_ascii_terminals_get_ascii_characters() -> None:
    epochs = [make_epoch(["ant", "bee"], [0.0, 60.0], run=run) for run in ("a", "b")]
    assert drawn(epochs, 100, encoding="ascii")[0].endswith("worst class ant at 0.0  06")
    assert "#####" in drawn(epochs[:1], 100, encoding="ascii")[1]


@settings(max_examples=50, deadline=None)
@given(
    names=st.lists(
        st.text(max_size=40) | st.sampled_from(["x" * 300, "[red]", "\x1b[2J", "猫" * 40]), min_size=1, max_size=30
    ),
    runs=st.lists(
        st.text(st.characters(blacklist_characters="/\x00", codec="utf-8"), min_size=1), min_size=1, max_size=3
    ),
    width=st.integers(20, 120),
    values=st.lists(st.none() | st.floats(0, 100), min_size=30, max_size=30),
)
def test_lines_fit_for_all_names_and_widths(
    names: list[str], runs: list[str], width: int, values: list[float | None]
) -> None:
    epochs = [make_epoch(names, values[: len(names)], run=f"r{run}") for run in runs]
    lines = drawn(epochs, width)
    assert all(cell_len(line) <= width for line in lines)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "".join(lines))
    if len(runs) > 1:
        assert len(lines) == len(runs)


@given(st.lists(st.tuples(st.integers(1, 9), st.text("ab ", min_size=1, max_size=9)), min_size=1), st.integers(1, 60))
def test_lightest_parts_are_left_out(parts: list[tuple[int, str]], width: int) -> None:
    line = fitted(parts, width)
    heaviest = max(parts, key=lambda part: part[0])
    assert heaviest[1] in line
    assert line == heaviest[1] or len(line) <= width
    if len("  ".join(text for _, text in parts)) <= width:
        assert line == "  ".join(text for _, text in parts)


def test_sparklines_rise_with_their_values() -> None:
    line = sparkline([float(value) for value in range(101)])
    assert list(line) == sorted(line)
    assert (line[0], line[-1], len(set(line))) == ("▁", "█", 8)


def test_without_a_terminal_each_run_prints_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(console, "ERR", Console(file=written, width=20))
    monkeypatch.setattr(console, "NOTE_SECONDS", 0.02)
    progress = console.ConsoleProgress()
    progress.start("train\x1b digits", 100, 10)
    time.sleep(0.03)
    for run in ("seed-0", "seed-1", "seed-1"):
        progress.advance(5)
        progress.epoch(make_epoch(["ant", "bee\n"], [50.0, 25.0], run=run))
    progress.finish()
    numbers = "epoch 3/30  loss 1.234  natural 81.5  robust 41.2  worst class bee at 25.0"
    assert written.getvalue().splitlines() == [
        f"train digits: 15/100  seed-0  {numbers}",
        f"train digits: 20/100  seed-1  {numbers}",
        "train digits: done in 0 s",
    ]


def test_tasks_without_epochs_show_bar_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Console(file=written, width=40, force_terminal=True, force_interactive=True, color_system=None)
    monkeypatch.setattr(console, "ERR", terminal)
    progress = console.ConsoleProgress()
    for task in ("pgd on a model with a very long name indeed", "sanity"):
        progress.start(task, 10)
        progress.advance(4, "out of memory: going on in batches of 64 images at a time")
        assert isinstance(console.ConsoleProgress.shown, LiveView)
        progress.advance(6)
        progress.finish()
        assert console.ConsoleProgress.shown is None
    text = written.getvalue()
    assert text.count(CURSOR_HIDDEN) == text.count(CURSOR_SHOWN) == 2
    frames = re.split(r"\x1b\[[0-9?]*[A-Za-z]|[\r\n]", text)
    assert max(map(cell_len, frames)) <= 40
    assert any(frame.startswith("out of memory: going on") for frame in frames)


def on_terminal(arguments: list[str], *, columns: int, interrupt_at: str | None = None) -> tuple[int, str, bool]:
    """Run the command on a terminal: its exit code, its output, and whether the terminal is restored."""
    load_data("digits", split="train")  # caches the images: decoding them would show a view of its own
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    import fcntl
    import subprocess

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "classwise", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )
    text, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        readable = select.select([master], [], [], 0.05)[0]
        if readable:
            text += os.read(master, 65536)
        elif process.poll() is not None:
            break
        if interrupt_at is not None and interrupt_at in text.decode(errors="replace"):
            process.send_signal(signal.SIGINT)
            interrupt_at = None
    try:
        code, same = process.wait(5), termios.tcgetattr(slave) == before
    finally:
        process.kill()
    with contextlib.suppress(OSError):
        os.close(slave)
        os.close(master)
    return code, text.decode(), same


QUICK: list[Any] = ["-o", "attack.steps=1", "-o", "validation_per_class=5", "-o", "batch_size=100", "--device", "cpu"]


def frames(text: str) -> list[str]:
    return re.split(r"\x1b\[2K|\x1b\[1A|[\r\n]+", re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", "", text))


def drawn_last(seen: list[str]) -> str:
    """The line of the last epoch in the last frame."""
    return [line for line in seen if line.startswith("epoch ")][-1]


def test_training_on_a_terminal(tmp_path: Path) -> None:
    arguments = ["train", "digits/trades", *QUICK, "-o", "epochs=3", "--out", str(tmp_path / "run")]
    code, text, same = on_terminal(arguments, columns=80)
    assert (code, same) == (0, True)
    seen = frames(text[: text.rindex(CURSOR_SHOWN)])
    assert max(map(cell_len, seen)) <= 80
    assert re.match(r"epoch 3/3  loss [\d.]+  natural [\d.]+  robust [\d.]+  worst class \d at ", drawn_last(seen))
    assert text.count(CURSOR_HIDDEN) == text.count(CURSOR_SHOWN) == 1
    assert re.search(r"best epoch \d of 3 .* worst class \d at ", text[text.rindex(CURSOR_SHOWN) :])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_interrupted_on_a_narrow_terminal(tmp_path: Path, workers: str) -> None:
    arguments = ["train", "digits/trades", *QUICK, "-o", "epochs=500", "--seeds", "0,1", "--out", str(tmp_path / "run")]
    arguments += ["--workers", workers]
    code, text, same = on_terminal(arguments, columns=40, interrupt_at="seed-1  worst class")
    assert (code, same) == (130, True)
    live, after = text.split(CURSOR_SHOWN)
    assert max(map(cell_len, frames(live))) <= 40
    assert next(filter(None, frames(after))).startswith("interrupted: finished work is saved")
    assert (tmp_path / "run" / "seed-1" / "checkpoints" / "last.pt").exists()
