"""Gaps against the tables of the papers, scipy, and hand computation."""

# K classes

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from classwise.analysis import gap
from classwise.core.errors import InputError

DATA = Path(__file__).parents[2] / "data"


def rows(found, model: str) -> tuple[dict, dict]:
    """The rows of one model: natural and robust."""
    natural, robust = found.frame.query("model == @model").to_dict("records")
    return natural, robust


def matrix(correct: list[int], n: int) -> list[list[int]]:
    """Return a confusion matrix with these correct counts; errors are predicted as the next class."""
    counts = np.diag(correct)
    counts[np.arange(len(correct)), (np.arange(len(correct)) + 1) % len(correct)] += n - np.array(correct)
    return counts.tolist()


@pytest.mark.parametrize("attack", ["FGSM", "PGD"])
def test_class_variance_and_mcd_of_the_paper(make_run, attack: str) -> None:
    """Tian et al. 2021, Table 1: 1000 images a class, so that the printed accuracies are exact.

    The paper rounds some of its results and cuts others after one decimal.
    """
    with (DATA / "kdd_table1_attacks.csv").open(encoding="utf-8", newline="") as file:
        printed = {row["defense"]: row for row in csv.DictReader(file) if row["attack"] == attack}
    assert list(printed) == ["Madry", "TRADES", "MART", "HE"]
    kept = {name: [round(10 * float(row[f"class{label}"])) for label in range(10)] for name, row in printed.items()}
    found = gap(*(make_run(name, matrix(correct, 1000)) for name, correct in kept.items()))
    for name, row in printed.items():
        natural, robust = rows(found, name)
        for text, value in (
            (row["cv"], robust["class_variance"]),
            (row["mcd"], robust["max_class_difference_points"]),
        ):
            assert float(text) in (
                round(value, 1),
                math.floor(10 * value + 1e-9) / 10,
                math.floor(10 * value - 1e-9) / 10,
            )
        assert robust["average_percent"] == pytest.approx(sum(kept[name]) / 100)
        # Class 1 is the most robust and class 3 the most vulnerable of every model, as the paper says.
        assert (robust["best_class"], robust["worst_class"]) == ("1", "3")
        assert (natural["class_variance"], natural["max_class_difference_points"]) == (0.0, 0.0)
    base, other = (rows(found, name)[1] for name in ("Madry", "TRADES"))
    assert other["max_class_difference_change_points"] == pytest.approx(
        other["max_class_difference_points"] - base["max_class_difference_points"], abs=1e-4
    )
    changes = [name for name in found.frame if name.endswith("_change_points")]
    assert len(changes) == 3
    assert found.frame.query("model == 'Madry'")[changes].isna().all(axis=None)
    # The natural variance is zero, so growth is undefined.
    growth = found.frames["growth"]
    assert growth["model"].tolist() == ["TRADES", "MART", "HE"]
    assert growth.drop(columns="model").isna().all(axis=None)


def test_growth_and_order(make_run) -> None:
    natural_counts, attacked = [9, 8, 10, 7, 9], [5, 4, 8, 1, 6]
    runs = [
        make_run("standard", matrix([1, 0, 2, 0, 0], 10), natural=matrix(natural_counts, 10)),
        make_run("robust", matrix(attacked, 10), natural=matrix([8, 8, 9, 6, 8], 10)),
    ]
    found = gap(*runs, attack="pgd")
    before, _ = rows(found, "standard")
    natural, robust = rows(found, "robust")
    assert before["class_variance"] == pytest.approx(100 * np.var(natural_counts))
    assert robust["class_variance"] == pytest.approx(100 * np.var(attacked))
    (growth,) = found.frames["growth"].to_dict("records")
    assert growth["class_variance_factor"] == pytest.approx(np.var(attacked) / np.var(natural_counts), abs=1e-4)
    assert growth["max_class_difference_factor"] == pytest.approx(7 / 3, abs=1e-4)
    assert growth["spearman"] == pytest.approx(spearmanr(natural_counts, attacked).statistic, abs=1e-4)
    assert growth["spearman_low"] < growth["spearman"] < growth["spearman_high"]
    assert f"{growth['spearman']:.2f} [" in found.finding
    assert (before["best_class_percent"], robust["best_class_percent"]) == (100.0, 80.0)
    differences = [robust[f"{name}_change_points"] for name in ("average", "worst_class", "max_class_difference")]
    assert differences == pytest.approx([42.0, 10.0, 50.0])
    assert natural["average_change_points"] == pytest.approx(-8.0)
    assert f"class variance (CV) {before['class_variance']:.1f} → {robust['class_variance']:.1f} (5.2 times)" in (
        found.finding
    )
    assert "maximum class difference (MCD) 30.0 → 70.0 points (2.3 times)" in found.finding
    assert found.frame["max_class_difference_points"].tolist() == [30.0, 30.0, 20.0, 70.0]


def test_figure_compares_natural_baseline_with_robust_models(make_run) -> None:
    runs = [make_run(name, matrix(correct, 10)) for name, correct in (("a", [3, 5]), ("b", [6, 8]), ("c", [1, 9]))]
    found = gap(*runs)
    bars, widths = found.figures()
    assert [drawn.name for drawn in bars.plot.data] == ["a, natural", "b, worst-case", "c, worst-case"]
    assert [list(drawn.y) for drawn in bars.plot.data] == [
        [100.0, 100.0, 100.0],
        [70.0, 60.0, 80.0],
        [50.0, 10.0, 90.0],
    ]
    assert list(bars.plot.names) == ["all", "0", "1"]
    assert [list(drawn.y) for drawn in widths.plot.data] == [[0.0, 0.0, 0.0], [20.0, 20.0, 80.0]]
    assert found.frame["worst_class_change_points"].tolist()[3:] == pytest.approx([np.nan, 30.0, -20.0], nan_ok=True)


def test_absent_and_many_classes(make_run) -> None:
    first, second = (np.array(matrix([4, 6, 8], 10)) for _ in range(2))
    second[0] = 0
    found = gap(make_run("whole", first.tolist()), make_run("absent", second.tolist()))
    robust = rows(found, "absent")[1]
    assert (robust["worst_class"], robust["max_class_difference_points"]) == ("1", 20.0)
    assert found.figures()[0].plot.data[1].y[1] is None
    json.dumps(found.to_dict(), allow_nan=False)

    random = np.random.default_rng(0)
    natural, *others = random.integers(0, 50, (3, 200))
    runs = [
        make_run(str(place), matrix(row.tolist(), 50), matrix(natural.tolist(), 50)) for place, row in enumerate(others)
    ]
    bars = gap(*runs).figures()[0]
    weakest = np.sort(np.argsort(natural, kind="stable")[:20])
    assert list(bars.plot.names) == ["all", *map(str, weakest)]
    assert "the 20 weakest classes of 0" in bars.title


def test_bad_input(make_run, tmp_path: Path) -> None:
    run = make_run("run", matrix([4, 6], 10))
    with pytest.raises(InputError, match="got 1 runs; expected 2 or more"):
        gap(run)
    with pytest.raises(InputError, match="needs an attack"):
        gap(run, run, attack="natural")
    with pytest.raises(InputError, match="unknown result 'cw'"):
        gap(run, run, attack="cw")
    with pytest.raises(InputError, match="classes"):
        gap(run, make_run("other", matrix([4, 6, 8], 10)))
    one = make_run("one", [[5]])
    with pytest.raises(InputError, match="1 class; at least 2"):
        gap(one, one)
    report = json.loads((run / "report.json").read_text())
    report["results"] = {"natural": report["results"]["natural"]}
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match="bare was evaluated without an attack"):
        gap(run, tmp_path / "bare")
