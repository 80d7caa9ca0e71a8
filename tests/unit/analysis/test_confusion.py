"""Confusion against hand-made matrices, scipy and scikit-learn."""

# K classes

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr
from sklearn.metrics import confusion_matrix as sklearn_confusion

from classwise.analysis import AnalysisResult, confusion
from classwise.analysis.confusion import symmetry
from classwise.core.errors import InputError
from classwise.metrics import wilson

COUNTS = [[6, 3, 1, 0], [1, 8, 1, 0], [0, 1, 5, 4], [0, 0, 2, 8]]
GROUPS = {"first": [0, 1], "second": [2, 3]}


def matrix(found: AnalysisResult, attack: str, column: str = "count") -> pd.DataFrame:
    """The matrix of a column, by true and predicted class."""
    rows = found.frame.query(f"attack == '{attack}'")
    return rows.pivot(index="label", columns="predicted", values=column)


def test_matrix_by_hand(make_run) -> None:
    found = confusion(make_run("run", COUNTS), superclasses=GROUPS)
    assert matrix(found, "worst-case").to_numpy().tolist() == COUNTS
    assert (np.diag(matrix(found, "natural")) == 10).all()
    shares = matrix(found, "worst-case", "share_of_class_percent")
    assert (shares.loc[2, 3], shares.loc[3, 2]) == (40.0, 20.0)
    low, high = (100 * end for end in wilson(6, 20))
    assert f"under all attacks: 2 – 3, with 30.0% [{low:.1f}, {high:.1f}] of their images" in found.finding
    worst, natural = found.frames["summary"].to_dict("records")
    assert (worst["attack"], natural["attack"]) == ("worst-case", "natural")
    # 0→1, 1→0, 2→3, 3→2 stay: 3 + 1 + 4 + 2 of 13; one of the three wrong classes lies in the superclass
    assert worst["within_superclass_percent"] == pytest.approx(100 * 10 / 13, abs=1e-3)
    assert worst["within_by_chance_percent"] == pytest.approx(100 / 3, abs=1e-3)
    assert np.isnan(natural["within_superclass_percent"])
    assert found.figures()[1].alt.endswith("No example is misclassified without attack.")
    assert "within_superclass_percent" not in confusion(make_run("none", COUNTS)).frames["summary"]


def test_counts_match_scikit_learn(trained: Path) -> None:
    found = confusion(trained, attack="pgd")
    table = pq.read_table(trained / "verdicts.parquet").to_pydict()
    expected = sklearn_confusion(table["label"], table["pred:pgd"], labels=range(10))
    assert matrix(found, "pgd").to_numpy().tolist() == expected.tolist()


def test_symmetry() -> None:
    mirrored = np.array([[5, 2, 3, 0], [2, 6, 1, 1], [3, 1, 4, 2], [0, 1, 2, 7]])
    assert symmetry(mirrored) == pytest.approx(1.0)
    rates = np.array(COUNTS) / 10
    off = ~np.eye(4, dtype=bool)
    assert symmetry(np.array(COUNTS)) == pytest.approx(pearsonr(rates[off], rates.T[off])[0])
    one_way = np.array([[5, 5, 0], [0, 5, 5], [5, 0, 5]])
    assert symmetry(one_way) == pytest.approx(-1.0)
    assert symmetry(np.diag([3, 4, 5])) is None


@given(st.integers(0, 2**32 - 1), st.integers(3, 8))
def test_symmetry_is_independent_of_class_order(seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    counts, order = random.integers(0, 20, (k, k)), random.permutation(k)
    one, other = symmetry(counts), symmetry(counts[np.ix_(order, order)])
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one == pytest.approx(other, abs=1e-9)


def test_symmetry_interval_contains_value_and_is_reproducible(make_run) -> None:
    run = make_run("run", (10 * np.array(COUNTS)).tolist())
    one, other = confusion(run), confusion(run)
    assert one == other
    found = one.frames["summary"].iloc[0]
    assert found["symmetry"] == pytest.approx(symmetry(np.array(COUNTS)), abs=1e-4)
    assert found["symmetry_low"] < found["symmetry"] < found["symmetry_high"]


def test_absent_class_and_thousand_classes(make_run) -> None:
    counts = np.array(COUNTS)
    counts[1] = 0
    found = confusion(make_run("absent", counts.tolist()))
    assert found.figures()
    many = np.eye(1000, dtype=int) + np.eye(1000, k=1, dtype=int)
    found = confusion(make_run("many", many.tolist()))
    assert "998 – 999, with 33.3%" in found.finding
    assert len(found.figures()[0].html()) < 1_000_000


def test_bad_input(make_run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 class; at least 2"):
        confusion(make_run("one", [[5]]))
    with pytest.raises(InputError, match="once"):
        confusion(make_run("run", COUNTS), superclasses={"a": [0, 1], "b": [1, 2, 3]})
    with pytest.raises(InputError, match="no such run directory"):
        confusion(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"report.json: evaluate"):
        confusion(tmp_path / "empty")
    (tmp_path / "run" / "verdicts.parquet").unlink()
    with pytest.raises(InputError, match=r"no verdicts.parquet"):
        confusion(tmp_path / "run")


def test_json_frame_and_finding(make_run) -> None:
    found = confusion(make_run("run", COUNTS, classes=["<b>cat</b>", "dog", "</script>", "car"]), superclasses=GROUPS)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["superclasses"] == GROUPS
    assert found.frame.query("attack == 'worst-case'")["count"].sum() == 40
    assert "</script> – car, with 30.0% [" in found.finding
    assert "76.9%" in found.finding
    assert found.frame.iloc[0][["class", "predicted_class", "count"]].tolist() == ["</script>", "car", 4]
    assert found.frame.iloc[0]["share_of_class_percent"] == 40.0
