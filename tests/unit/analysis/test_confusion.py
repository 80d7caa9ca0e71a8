"""Confusion against hand-made matrices, scipy and scikit-learn."""

# K classes

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr
from sklearn.metrics import confusion_matrix as sklearn_confusion

from classwise.analysis import confusion
from classwise.analysis.confusion import symmetry
from classwise.core.errors import InputError

COUNTS = [[6, 3, 1, 0], [1, 8, 1, 0], [0, 1, 5, 4], [0, 0, 2, 8]]
GROUPS = {"first": [0, 1], "second": [2, 3]}


def test_matrix_by_hand(make_run) -> None:
    found = confusion(make_run("run", COUNTS), superclasses=GROUPS)
    assert found.adversarial.counts == COUNTS
    assert found.adversarial.wrong == 13
    top = found.adversarial.pairs[0]
    assert (top.one, top.other, top.share.value, top.share.n) == ("2", "3", 30.0, 20)
    assert (top.one_for_other.value, top.other_for_one.value) == (40.0, 20.0)
    # 0→1, 1→0, 2→3, 3→2 stay: 3 + 1 + 4 + 2 of 13; one of the three wrong classes lies in the superclass
    assert found.adversarial.within_superclass.value == pytest.approx(100 * 10 / 13, abs=1e-3)
    assert found.adversarial.within_by_chance == pytest.approx(100 / 3, abs=1e-3)
    assert found.adversarial.by_superclass == [[18, 2], [1, 19]]
    assert found.natural.wrong == 0
    assert found.natural.pairs == []


def test_counts_match_scikit_learn(trained: Path) -> None:
    found = confusion(trained, attack="pgd")
    table = pq.read_table(trained / "verdicts.parquet").to_pydict()
    expected = sklearn_confusion(table["label"], table["pred:pgd"], labels=range(10))
    assert found.adversarial.counts == expected.tolist()


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
    assert one.adversarial.symmetry == other.adversarial.symmetry
    found = one.adversarial.symmetry
    assert found.low <= found.value <= found.high


def test_absent_class_and_thousand_classes(make_run) -> None:
    counts = np.array(COUNTS)
    counts[1] = 0
    found = confusion(make_run("absent", counts.tolist()))
    assert found.figures()
    many = np.eye(1000, dtype=int) + np.eye(1000, k=1, dtype=int)
    found = confusion(make_run("many", many.tolist()))
    assert len(found.adversarial.pairs) == 10
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
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["schema"] == "classwise/analysis-confusion/1"
    assert found.frame.query("attack == 'worst-case'")["count"].sum() == 40
    assert "</script> – car, with 30.0% [" in found.finding
    assert "76.9%" in found.finding
    assert found.frame.iloc[0][["class", "predicted_class", "count"]].tolist() == ["</script>", "car", 4]
    assert found.frame.iloc[0]["share_of_class_percent"] == 40.0
