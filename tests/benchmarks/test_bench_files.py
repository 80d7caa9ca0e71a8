"""The files of a benchmark are complete and readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import evaluate, growth, train
from benchmarks.measure import spread
from benchmarks.result import Bench, check_place, circumstances, draw, protocol
from classwise.core.errors import InputError
from classwise.reporting.estimates import estimate
from classwise.storage.files import read_json

COMMITTED = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results"


def content(name: str, **details: Any) -> dict[str, Any]:
    return {**circumstances(name, torch.device("cpu"), 3, False, ["art is left out: not installed"]), **details}


def attack_entry(name: str, *values: float, ours: float) -> dict[str, Any]:
    return {
        "name": name,
        "version": None,
        "seconds": spread(values),
        "ratio": spread(values)["median"] / ours,
        "warm_up": 9.0,
        "forwards": 12_345,
        "backwards": 12_000,
        "peak_bytes": None,
        "robust": estimate(41, 100),
        "rejected": 0,
    }


def evaluation() -> Bench:
    rivals = [attack_entry("classwise", 1.0, 2.0, 1.5, ours=1.5), attack_entry("foo|bar <1>", 3.0, 2.5, 6.0, ours=1.5)]
    return evaluate.present(
        content(
            "evaluate",
            model="net",
            data="digits/test",
            images=100,
            batch_size=50,
            threat={"norm": "Linf", "eps": 0.1, "eps_text": "0.1"},
            natural=estimate(90, 100),
            cases=[{"spec": "pgd:steps=5", "settings": "PGD()", "entries": rivals}],
        )
    )


def training() -> Bench:
    entry = {"step": spread([1.0, 2.0, 3.0]), "epoch": 28.0, "ratio": 1.0, "warm_up": 5.0, "peak_bytes": 3 * 2**20}
    entries = [{"name": "classwise", **entry, "loss": 1.5}, {"name": "reference style", **entry, "loss": None}]
    details = {"recipe": "digits/trades", "overrides": {}, "steps": 10, "batch_size": 64, "attack_steps": 7}
    return train.present(content("train", **details, steps_per_epoch=14, entries=entries))


def growing() -> Bench:
    found = growth.entry("steps", [5, 10], [[1.0, 1.1], [2.0, 2.1]], [[10, 10], [11, 10]])
    return growth.present(content("growth", attack="PGD", base={"steps": 5}, entries=[found]))


@pytest.mark.parametrize("make", [evaluation, training, growing])
def test_the_three_files(make: Any, tmp_path: Path) -> None:
    bench = make()
    bench.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.md", "bench.svg"}
    assert read_json(tmp_path / "out" / "bench.json") == bench.content
    text = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert text == bench.markdown
    assert "art is left out: not installed" in text
    columns = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    drawing = "".join(ElementTree.fromstring((tmp_path / "out" / "bench.svg").read_text(encoding="utf-8")).itertext())
    for title, group in bench.bars.items():
        for name in (title, *group):
            assert name in drawing


def test_committed_results_have_the_keys_that_are_written_today() -> None:
    def keys(found: Any) -> Any:
        if isinstance(found, list):
            return [keys(found[0])] if found else []
        return {key: keys(value) for key, value in found.items()} if isinstance(found, dict) else None

    modules = {"evaluate": (evaluate, evaluation()), "train": (train, training()), "growth": (growth, growing())}
    files = sorted(COMMITTED.glob("*/bench.json"))
    assert files
    for file in files:
        found = read_json(file)
        module, today = modules[found["schema"].removeprefix("classwise/bench-").removesuffix("/1")]
        assert set(found) == set(today.content), file
        for part in ("cases", "entries"):
            assert keys(found.get(part)) == keys(today.content.get(part)), file
        assert module.present(found).markdown, file


def test_the_table_of_an_evaluation() -> None:
    lines = [line.replace("\\|", "/") for line in evaluation().tables[0].splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert (first["seconds"], first["min–max"], first["× ours"]) == ("1.50", "1.00–2.00", "1.00")
    assert (second["seconds"], second["min–max"], second["× ours"]) == ("3.00", "2.50–6.00", "2.00")
    assert (first["forwards"], first["peak memory"]) == ("12,345", "–")
    assert first["robust, % [95%]"].startswith("41.0 [")


def test_a_diverged_loss_and_an_interruption_are_written() -> None:
    assert "| diverged |" in training().tables[0]
    assert "3 interleaved rounds (interrupted)" in protocol(evaluation().content | {"interrupted": True})


def test_the_axis_is_logarithmic_if_values_differ_by_more_than_thirty_times() -> None:
    def drawn(*medians: float, high: float = 0.0) -> str:
        spreads = {f"{one}": {"median": one, "low": one, "high": max(one, high)} for one in medians}
        return draw({"all": spreads})

    assert "seconds, logarithmic" in drawn(1.0, 30.1)
    assert "logarithmic" not in drawn(1.0, 29.9)
    assert "logarithmic" not in drawn(1.0, 2.0, high=1000.0)  # one slow round


def test_unusable_output_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file, not a directory"):
        check_place(tmp_path / "file")
    training().save(tmp_path / "old")
    with pytest.raises(InputError, match="already contains a benchmark"):
        check_place(tmp_path / "old")
    check_place(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()
