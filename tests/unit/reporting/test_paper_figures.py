"""Figures for papers show the report's numbers and take any name for text."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from classwise.reporting import paper_figures
from classwise.reporting.comparison import compare
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

pytest.importorskip("matplotlib", reason="figures need the extra classwise[figures]")

N = 20


def make_report(
    kept: list[int], classes: list[str] | None = None, attack: str = "pgd", name: str = "net"
) -> ClassReport:
    k = len(kept)
    label, rank = np.repeat(np.arange(k), N), np.tile(np.arange(N), k)
    predicted = np.where(rank < np.asarray(kept)[label], label, (label + 1) % k)
    verdicts = Verdicts(index=np.arange(k * N), label=label, natural=label.copy(), attacks={attack: predicted})
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="birds", split="test", n=k * N, classes=classes or [f"c{i}" for i in range(k)]),
        model={"name": name},
        threat=ThreatInfo(norm="Linf", eps=0.03, eps_text="8/255"),
        attacks={},
    )


def texts(file: Path) -> str:
    return " ".join(text for element in ET.parse(file).iter() for text in element.itertext())


def test_every_chart_is_written_as_svg_and_png(tmp_path: Path) -> None:
    report = make_report([10, 4, 18, 15])
    files = paper_figures.save_figures(report, tmp_path / "new" / "folder")
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in ("classes", "confusion-0", "confusion-1", "confusion-2") for kind in ("svg", "png")
    }
    assert all(word in texts(files[0]) for word in ("c0", "c1", "c2", "c3", "whole model 58.8"))
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as picture:
                assert picture.width > 1200
    names = {file.name for file in paper_figures.save_figures(compare(report, report, names=["x", "y"]), tmp_path)}
    assert names == {f"{n}.{kind}" for n in ("average-and-worst", "classes", "radar") for kind in ("svg", "png")}


def test_bars_are_as_long_as_the_accuracies_and_begin_with_the_weakest() -> None:
    report = make_report([10, 4, 18, 15])
    with paper_figures._drawing():
        (axes,) = paper_figures._class_bars(report).axes
    lengths = [bar.get_width() for bar in axes.patches]
    assert lengths[::2] == [100.0] * 4  # natural
    assert lengths[1::2] == [20.0, 50.0, 75.0, 90.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c1", "c0", "c3", "c2"]
    assert axes.get_xlim() == (0, 100)
    whiskers = [sorted(line.get_xdata()) for line in axes.lines[:4]]
    worst = report["pgd"].by_class[1]
    assert whiskers[0] == pytest.approx([worst.low, worst.high])


def test_the_same_report_gives_the_same_file(tmp_path: Path) -> None:
    report = make_report([10, 4, 18])
    one, other = (paper_figures.save_figures(report, tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    assert one == other


@pytest.mark.parametrize("k", [2, 10, 41, 300])
def test_any_number_of_classes(k: int, tmp_path: Path) -> None:
    report = make_report([(7 * i) % (N + 1) for i in range(k)])
    files = paper_figures.save_figures(report, tmp_path / "one")
    assert len(files) == (2 if k > 40 else 8)
    both = compare(report, report, names=["x", "y"])
    assert len(paper_figures.save_figures(both, tmp_path / "two")) == (6 if 2 < k <= 40 else 4)


def test_names_are_text_and_never_formulas(tmp_path: Path) -> None:
    hostile = ["$\\frac{1}{0}$", "<script>alert(1)</script>", "a\x00b\u202ec\nd", "x" * 300, "\ud800 \U0001f600"]
    report = make_report([5, 6, 7, 8, 9], classes=hostile, attack="$x^", name="$y_")
    files = paper_figures.save_figures(report, tmp_path / "one")
    files += paper_figures.save_figures(compare(report, report, names=["$y_", "<b>"]), tmp_path / "two")
    for file in files:
        if file.suffix == ".svg":
            ET.parse(file)  # well formed
    assert "$\\frac{1}{0}$" in texts(files[0])
    assert "<script>" not in files[0].read_text(encoding="utf-8")


def test_without_matplotlib_it_is_said_before_anything_starts(tmp_path: Path) -> None:
    words = ["classwise", "evaluate", "--model", "digits-cnn", "--data", "digits", "--out", str(tmp_path / "o")]
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from classwise.cli import main\n"
        f"sys.argv = {[*words, '--figures', 'f']!r}\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip() == "error: figures are drawn by matplotlib: pip install 'classwise[figures]'"
    assert not (tmp_path / "o").exists()
