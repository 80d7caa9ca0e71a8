"""Intervals of accuracy against exact fractions."""

# K classes

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.analysis import intervals
from classwise.analysis.intervals import NAMES, count_classes, place_of
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate, estimate


def diagonal(correct: list[int], n: int = 20) -> list[list[int]]:
    """Return a confusion matrix with these correct counts; errors are predicted as the next class."""
    counts = np.diag(correct)
    counts[np.arange(len(correct)), (np.arange(len(correct)) + 1) % len(correct)] += n - np.array(correct)
    return counts.tolist()


def counts(found, model: str, attack: str = "worst-case") -> list[int]:
    """The counts of one model in the frame."""
    return found.frame.query(f"model == '{model}' and attack == '{attack}'")["classes"].tolist()


def test_by_hand(make_run) -> None:
    found = intervals(make_run("run", diagonal([0, 1, 2, 3, 4, 18, 20]), classes=list("abcdefg")))
    # 0, 5, 10 | 15, 20 | 90 | 100 percent
    assert counts(found, "run") == [3, 2, 0, 0, 0, 0, 0, 0, 1, 1]
    assert counts(found, "run", "natural") == [0] * 9 + [7]
    assert found.frames["totals"]["at_0_percent"].tolist() == [1, 0]
    assert found.frame["interval_percent"].tolist() == 2 * NAMES
    assert NAMES[0] == "[0, 10]"
    assert NAMES[-1] == "(90, 100]"
    assert found.finding == (
        "run: under all attacks, 7 classes lie in 4 of the 10 intervals, from [0, 10] to (90, 100]%, 1 of them at 0."
    )
    assert found.to_dict()["frames"]["totals"][0]["classes"] == 7
    assert found.to_dict()["models"] == ["run"]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=30))
def test_against_fractions(pairs: list[tuple[int, int]]) -> None:
    pairs = [(min(pair), max(pair)) for pair in pairs]
    parts = [Estimate(**estimate(correct, n)) for correct, n in pairs]
    found = count_classes(parts)
    shares = [Fraction(*pair) for pair in pairs if pair[1]]
    expected = [sum(Fraction(k, 10) < share <= Fraction(k + 1, 10) for share in shares) for k in range(10)]
    expected[0] += sum(share == 0 for share in shares)
    assert found.counts == expected
    assert found.present == len(shares)
    assert found.zero == sum(share == 0 for share in shares)
    assert 0 <= found.sure <= found.present


def test_sure_classes() -> None:
    few, many = Estimate(**estimate(11, 20)), Estimate(**estimate(11_000, 20_000))
    assert count_classes([few, many]).sure == 1
    at_a_border = Estimate(**estimate(10_000, 20_000))
    assert place_of(50.0) == 4
    assert count_classes([at_a_border]).sure == 0


def test_several_runs_with_different_data(make_run) -> None:
    runs = [make_run("one", diagonal([5, 10, 15])), make_run("two", diagonal([3, 4, 5, 6, 7]))]
    found = intervals(*runs, runs[0])
    names = ["one", "two", "one (2)"]
    assert found.about["models"] == names
    assert found.frames["totals"]["classes"].tolist() == [3, 3, 5, 5, 3, 3]
    first, second = found.figures()
    assert [list(drawn.y) for drawn in first.plot.data] == [counts(found, name) for name in names]
    assert [list(drawn.y) for drawn in second.plot.data] == [counts(found, name, "natural") for name in names]
    shares = found.frame.query("model == 'two' and attack == 'worst-case'")["share_of_classes_percent"]
    assert sum(shares) == pytest.approx(100)
    assert len(intervals(runs[0]).figures()) == 1


def test_absent_classes_and_thousand_classes(make_run) -> None:
    present = np.array(diagonal([5, 10, 15]))
    present[1] = 0
    assert sum(counts(intervals(make_run("absent", present.tolist())), "absent")) == 2
    random = np.random.default_rng(0)
    correct = random.integers(0, 5, 1000)
    found = intervals(make_run("many", diagonal(correct.tolist(), n=4)), attack="pgd")
    assert counts(found, "many", "pgd") == [
        int(np.sum(correct == number)) for number in (0, -1, 1, -1, 2, -1, -1, 3, -1, 4)
    ]
    assert found.frames["totals"]["at_0_percent"].tolist() == [int(np.sum(correct == 0)), 0]


def test_bad_input(make_run) -> None:
    run = make_run("run", diagonal([5, 10]))
    with pytest.raises(InputError, match="got 7 runs; expected 1 to 6"):
        intervals(*[run] * 7)
    with pytest.raises(InputError, match="got 0 runs"):
        intervals()
    with pytest.raises(InputError, match="unknown result 'cw'"):
        intervals(run, attack="cw")
    report = json.loads((run / "report.json").read_text())
    report["results"] = {"natural": report["results"]["natural"]}
    (run / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match="was evaluated without an attack"):
        intervals(run)
