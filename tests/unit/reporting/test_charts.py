"""Charts show the numbers of the report and treat all names as text."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from classwise.reporting import charts
from classwise.reporting.comparison import compare
from classwise.reporting.figures import Series, bars
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

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


def test_every_chart_is_written_as_svg_pdf_and_png(tmp_path: Path) -> None:
    report = make_report([10, 4, 18, 15])
    files = charts.save_figures(report, tmp_path / "new" / "folder")
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in ("classes", "confusion-0", "confusion-1", "confusion-2") for kind in charts.KINDS
    }
    assert all(word in texts(files[0]) for word in ("c0", "c1", "c2", "c3", "all classes 58.8%"))
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as picture:
                assert picture.width > 1200
    names = {file.name for file in charts.save_figures(compare(report, report, names=["x", "y"]), tmp_path)}
    assert names == {f"{n}.{kind}" for n in ("average-and-worst", "classes", "radar") for kind in charts.KINDS}


def test_bars_are_as_long_as_the_accuracies_and_begin_with_the_weakest() -> None:
    report = make_report([10, 4, 18, 15])
    (axes,) = charts.class_bars(report, "pgd").plot.draw(468, 9).axes  # type: ignore[union-attr]
    boxes = [box for box in axes.get_children() if str(box.get_gid()).startswith("bar--")]
    lengths = [box.get_width() for box in boxes]  # type: ignore[attr-defined]
    assert lengths[:4] == [100.0] * 4  # natural
    assert lengths[4:] == [20.0, 50.0, 75.0, 90.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c1", "c0", "c3", "c2"]
    assert axes.get_xlim() == (0, 100)
    worst = report["pgd"].by_class[1]
    assert axes.collections[-1].get_segments()[0][:, 0].tolist() == pytest.approx([worst.low, worst.high])  # type: ignore[attr-defined]


def test_names_of_negative_bars_stay_beside_the_axes() -> None:
    figure = bars(["ant", "bee"], [Series(name="change", y=[-12.0, 5.0])], title="t", alt="a", y="points")
    (axes,) = figure.plot.draw(468, 9).axes  # type: ignore[union-attr]
    low, high = axes.get_xlim()
    assert low < -12.0
    assert high > 5.0
    assert not axes.spines["left"].get_visible()


def test_the_same_report_gives_the_same_file(tmp_path: Path) -> None:
    report = make_report([10, 4, 18])
    for one, other in zip(*(charts.save_figures(report, tmp_path / name) for name in ("a", "b")), strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("k", [2, 10, 41, 300])
def test_any_number_of_classes(k: int, tmp_path: Path) -> None:
    report = make_report([(7 * i) % (N + 1) for i in range(k)])
    files = charts.save_figures(report, tmp_path / "one")
    assert len(files) == (3 if k > charts.MOST_DRAWN else 12)
    both = compare(report, report, names=["x", "y"])
    assert len(charts.save_figures(both, tmp_path / "two")) == (9 if 2 < k <= 40 else 6)


def test_names_are_text_and_never_formulas(tmp_path: Path) -> None:
    hostile = ["$\\frac{1}{0}$", "<script>alert(1)</script>", "a\x00b\u202ec\nd", "x" * 300, "\ud800 \U0001f600"]
    report = make_report([5, 6, 7, 8, 9], classes=hostile, attack="$x^", name="$y_")
    files = charts.save_figures(report, tmp_path / "one")
    files += charts.save_figures(compare(report, report, names=["$y_", "<b>"]), tmp_path / "two")
    for file in files:
        if file.suffix == ".svg":
            ET.parse(file)  # well formed
    assert "$\\frac{1}{0}$" in texts(files[0])
    assert "<script>" not in files[0].read_text(encoding="utf-8")


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = (
        "import sys; from classwise.reporting import pages; from classwise.reporting.charts import class_bars; "
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
