"""The files of a bench: whole, readable, and saying what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.chart import LOG_BEYOND, PLOT, Bar, Group, axis, draw
from benchmarks.growth import entry
from benchmarks.result import (
    AttackCase,
    AttackEntry,
    Bench,
    EvaluationBench,
    GrowthBench,
    Spread,
    TrainingBench,
    TrainingEntry,
)
from benchmarks.rounds import spread
from benchmarks.save import check_place, save
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate, estimate
from classwise.reporting.report import ThreatInfo
from classwise.storage.files import read_json

SVG = "{http://www.w3.org/2000/svg}"
COMMON: dict[str, Any] = {
    "device": "cpu",
    "hardware": {"platform": "here", "cpus": 2, "threads": 1, "gpu": None},
    "versions": {"torch": "2"},
    "rounds": 3,
    "notes": ["art is left out: not installed"],
}


def attack_entry(name: str, *values: float, ours: float) -> AttackEntry:
    found = spread(values)
    return AttackEntry(
        name=name,
        version=None,
        seconds=found,
        ratio=found.median / ours,
        warm_up=9.0,
        forwards=12_345,
        backwards=12_000,
        peak_bytes=None,
        robust=Estimate(**estimate(41, 100)),
        rejected=0,
    )


def evaluation() -> EvaluationBench:
    rivals = [attack_entry("classwise", 1.0, 2.0, 1.5, ours=1.5), attack_entry("foo|bar <1>", 3.0, 2.5, 6.0, ours=1.5)]
    return EvaluationBench(
        **COMMON,
        model="net",
        data="digits/test",
        images=100,
        batch_size=50,
        threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
        natural=Estimate(**estimate(90, 100)),
        cases=[AttackCase(spec="pgd:steps=5", settings="PGD()", entries=rivals)],
    )


def training() -> TrainingBench:
    entries = [
        TrainingEntry(
            name=name, step=spread([1.0, 2.0, 3.0]), epoch=28.0, ratio=1.0, warm_up=5.0, peak_bytes=3 * 2**20, loss=1.5
        )
        for name in ("classwise", "reference style")
    ]
    return TrainingBench(
        **COMMON,
        recipe="digits/trades",
        overrides={"attack.steps": 2},
        steps=10,
        batch_size=64,
        attack_steps=7,
        steps_per_epoch=14,
        entries=entries,
    )


def growth() -> GrowthBench:
    found = entry("steps", [5, 10], [[1.0, 1.1], [2.0, 2.1]], [[10, 10], [11, 10]])
    return GrowthBench(**COMMON, attack="PGD", base={"steps": 5}, entries=[found])


@pytest.mark.parametrize("bench", [evaluation(), training(), growth()], ids=lambda bench: type(bench).__name__)
def test_what_is_written_can_be_read(bench: Bench, tmp_path: Path) -> None:
    save(bench, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.md", "bench.svg"}
    content = read_json(tmp_path / "out" / "bench.json")
    assert type(bench).model_validate(content) == bench
    assert content["schema"].startswith("classwise/bench-")
    text = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert "art is left out: not installed" in text
    columns = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    drawing = ElementTree.fromstring((tmp_path / "out" / "bench.svg").read_text(encoding="utf-8"))
    bars = drawing.findall(f".//{SVG}rect[@class='bar']")
    assert len(bars) == sum(len(group.bars) for group in bench.groups())


def test_the_table_of_an_evaluation() -> None:
    (table,) = evaluation().tables()
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (first["seconds"], first["min–max"], first["× ours"]) == ("1.50", "1.00–2.00", "1.00")
    assert (second["seconds"], second["min–max"], second["× ours"]) == ("3.00", "2.50–6.00", "2.00")
    assert (first["forwards"], first["peak memory"]) == ("12,345", "–")
    assert first["robust, % [95%]"].startswith("41.0 [")


def test_an_interrupted_one_says_so() -> None:
    bench = evaluation().model_copy(update={"interrupted": True})
    assert "3 interleaved rounds (interrupted)" in bench.tables()[0].about


def drawn(*values: float) -> list[float]:
    """The lengths of bars of these values."""
    bars = [Bar(name="one", value=value, low=value, high=value, text="") for value in values]
    drawing = ElementTree.fromstring(draw([Group(title="all", bars=bars)], label="seconds"))
    return [float(bar.attrib["width"]) for bar in drawing.findall(f".//{SVG}rect[@class='bar']")]


def test_bars_are_as_long_as_their_values() -> None:
    one, two = drawn(1.0, 2.0)
    assert two == pytest.approx(2 * one, abs=0.2)


def test_a_wide_range_is_drawn_in_logarithms() -> None:
    """Equal ratios are equal distances."""
    one, two, three = drawn(0.01, 0.1, 1.0)
    assert two - one == pytest.approx(three - two, abs=0.2)
    assert axis([1.0, LOG_BEYOND * 1.01]).logarithmic
    assert not axis([1.0, LOG_BEYOND * 0.99]).logarithmic
    assert not axis([1.0, 2.0], bounds=[1.0, 1000.0]).logarithmic  # one slow round is no range of values


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.03, 1.0, 7.0, 123.0, 9e4])
def test_the_axis_holds_everything(scale: float) -> None:
    for values in ([scale, 1.7 * scale], [scale, 900 * scale], [scale]):
        found = axis(values, [0.9 * scale, 1.1 * values[-1]])
        assert found.ticks == sorted(set(found.ticks))
        assert 2 <= len(found.ticks) <= 8
        assert all(0 <= found.at(bound) <= 1 for bound in (0.9 * scale, *values, 1.1 * values[-1]))
    assert max(drawn(scale)) <= PLOT


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file, not a directory"):
        check_place(tmp_path / "file")
    save(training(), tmp_path / "old")
    with pytest.raises(InputError, match="already holds a bench"):
        check_place(tmp_path / "old")
    check_place(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()


def test_a_spread_is_kept_whole() -> None:
    assert Spread.model_validate(spread([2.0, 1.0]).model_dump()).values == [2.0, 1.0]
