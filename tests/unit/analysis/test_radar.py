"""Radar charts against metrics, hand computation and scipy."""

# K classes

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from classwise.analysis import Run, radar
from classwise.analysis.plots import shown_classes
from classwise.analysis.run import unique_names
from classwise.core.errors import InputError
from classwise.metrics import paired_changes
from classwise.reporting import load_report
from classwise.reporting.figures import Bars, Radar

BASE = [[12, 8, 0], [2, 16, 2], [0, 4, 16]]
BETTER = [[19, 1, 0], [3, 15, 2], [0, 5, 15]]


def column(found, model: str, name: str) -> list:
    """One column of one model, in label order."""
    return found.frame.query("model == @model").sort_values("label")[name].tolist()


def test_differences_are_paired_on_shared_examples(make_run) -> None:
    runs = make_run("base", BASE), make_run("better", BETTER)
    found = radar(*runs, attack="pgd")
    assert found.about["paired"]
    assert column(found, "base", "accuracy_percent") == [60.0, 80.0, 80.0]
    assert np.isnan(column(found, "base", "difference_points")).all()
    assert column(found, "better", "difference_points") == [35.0, -5.0, -5.0]
    before, after = (load_report(run).verdicts for run in runs)
    expected = paired_changes(before.label, before.survived("pgd"), after.survived("pgd"), 3)
    for name in ("gained", "lost", "p_value"):
        assert column(found, "better", name) == [getattr(change, name) for change in expected]
    # Class 0: its first 12 examples survive the one and its first 19 the other, so that seven are gained.
    assert (column(found, "better", "gained")[0], column(found, "better", "lost")[0]) == (7, 0)
    assert column(found, "better", "p_value")[0] == pytest.approx(3 * binomtest(7, 7).pvalue)
    assert "1 classes higher, 2 lower (significant: 1 higher, 0 lower)" in found.finding
    assert "from class 1 (−5.0 points, p = 1.000) to class 0 (+35.0 points, p = 0.047)" in found.finding


def test_different_examples_have_no_p_values(make_run) -> None:
    found = radar(make_run("base", BASE), make_run("fewer", [[5, 5, 0], [0, 9, 1], [0, 0, 10]]))
    assert not found.about["paired"]
    assert column(found, "fewer", "difference_points") == [-10.0, 10.0, 20.0]
    assert "significant" not in found.finding
    assert "p = " not in found.finding
    assert found.frame[["p_value", "gained", "lost"]].isna().all(axis=None)


def test_figure_is_closed_and_in_label_order(make_run) -> None:
    names = ["cat", "<b>dog</b>", "cat"]
    found = radar(make_run("base", BASE, classes=names), make_run("better", BETTER, classes=names))
    drawn = found.figures()[0].plot
    assert isinstance(drawn, Radar)
    assert list(drawn.data[0].y) == [60.0, 80.0, 80.0]
    assert drawn.names == names
    (axes,) = drawn.draw(400, 10).axes
    line = axes.lines[0]
    assert list(line.get_ydata()) == [60.0, 80.0, 80.0, 60.0]  # closed
    assert len(set(line.get_xdata())) == 4  # a direction for each class, although two have the same name
    assert line.get_xdata()[3] == pytest.approx(2 * np.pi)
    assert "<b>dog</b>" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim() == (0, 100)
    low, high = drawn.data[1].low[0], drawn.data[1].high[0]
    assert low == column(found, "better", "accuracy_percent_low")[0] < 95.0 < high
    differences = found.figures()[1].plot
    assert list(differences.data[0].y) == [35.0, -5.0, -5.0]
    assert differences.data[0].color.lower() == axes.lines[1].get_color()


def test_natural_and_worst_case_results(make_run) -> None:
    runs = make_run("a", BASE, natural=BETTER), make_run("b", BETTER, natural=BASE)
    assert column(radar(*runs, attack="natural"), "b", "difference_points") == [-35.0, 5.0, 5.0]
    assert radar(*runs).about["attack"] == "worst-case"


def test_figure_shows_the_weakest_of_many_classes(make_run) -> None:
    random = np.random.default_rng(1)
    one, other = (random.integers(0, 11, 100) for _ in range(2))
    names = [f"class {label}" for label in range(100)]

    def run(name: str, correct: np.ndarray) -> object:
        counts = np.diag(correct)
        counts[np.arange(100), (np.arange(100) + 1) % 100] += 10 - correct
        return make_run(name, counts.tolist(), classes=names)

    found = radar(run("one", one), run("other", other))
    assert found.frame["label"].tolist() == np.argsort(one, kind="stable").repeat(2).tolist()
    assert len(column(found, "other", "difference_points")) == 100
    drawn = found.figures()[0]
    assert drawn.plot.names == [names[label] for label in np.sort(np.argsort(one, kind="stable")[:20])]
    assert "20 weakest classes" in drawn.title
    assert found.tables()[0].foot == "20 of 200 rows; the parquet file has all."
    assert len(found.tables()[0].rows) == 20
    assert len(found.frame) == 200


def test_shown_classes() -> None:
    assert shown_classes([None, *range(39)]) == list(range(40))
    assert shown_classes([None, *range(40, 0, -1)]) == list(range(21, 41))
    assert shown_classes([5.0] * 1000) == list(range(20))
    assert shown_classes([None] * 30 + [1.0] * 15) == [0, 1, 2, 3, 4, *range(30, 45)]


def test_absent_classes_leave_gaps(make_run) -> None:
    missing = np.array(BETTER)
    missing[1] = 0
    found = radar(make_run("base", BASE), make_run("missing", missing.tolist()))
    assert list(found.figures()[0].plot.data[1].y) == [95.0, None, 75.0]
    assert found.frame.query("label == 1")["difference_points"].isna().all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_one_or_two_classes_are_bars(make_run) -> None:
    two = radar(make_run("a", [[5, 5], [2, 8]]), make_run("b", [[7, 3], [2, 8]]))
    assert isinstance(two.figures()[0].plot, Bars)
    one = radar(make_run("c", [[5]]), make_run("d", [[5]]))
    assert list(one.figures()[0].plot.data[1].y) == [100.0]
    assert column(one, "d", "difference_points") == [0]


def test_bad_input(make_run) -> None:
    run = make_run("run", BASE)
    with pytest.raises(InputError, match="got 1 runs; expected 2 to 6"):
        radar(run)
    with pytest.raises(InputError, match="got 7 runs"):
        radar(*[run] * 7)
    with pytest.raises(InputError, match="unknown result 'cw'"):
        radar(run, run, attack="cw")
    with pytest.raises(InputError, match="classes"):
        radar(run, make_run("other", BASE, classes=["a", "b", "c"]))
    assert radar(*[run] * 6).about["models"] == ["run", *(f"run ({number})" for number in range(2, 7))]


def test_unique_names_of_runs(make_run) -> None:
    first, second = make_run("first", BASE), make_run("second", BETTER)
    assert unique_names([Run.open(first), Run.open(second)]) == ["first", "second"]
    for run in (first, second):
        report = json.loads((run / "report.json").read_text())
        (run / "report.json").write_text(json.dumps(report | {"model": {"name": "resnet18"}}))
    assert unique_names([Run.open(first)]) == ["resnet18"]
    assert unique_names([Run.open(run) for run in (first, second, first)]) == ["first", "second", "first (2)"]
