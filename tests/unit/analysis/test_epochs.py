"""Epochs against histories by hand, numpy, and a training."""

# K classes

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.analysis import epochs
from classwise.analysis.epochs import Accuracy, curve_of
from classwise.core.errors import InputError

Shares = Sequence[Sequence[float | None]]
BY_HAND = [[10.0, 50.0, 30.0], [30.0, 20.0, 40.0], [30.0, 60.0, 30.0], [50.0, 70.0, 30.0]]


@pytest.fixture
def make_training(tmp_path: Path) -> Callable[..., Path]:
    """``make_training(robust, natural=None, n=10, best=())``: a directory with this history."""

    def make(
        robust: Shares | None, natural: Shares | None = None, n: int | Sequence[int] = 10, best: Sequence[int] = (1,)
    ) -> Path:
        length = len(robust or natural or [])

        def part(shares: Shares | None, place: int) -> dict[str, object] | None:
            if shares is None:
                return None
            known = [share for share in shares[place] if share is not None]
            return {"overall": round(sum(known) / len(known), 4), "by_class": list(shares[place])}

        classes = len((robust or natural or [[]])[0])
        records = [
            {
                "epoch": place + 1,
                "validation": {
                    "n": [n] * classes if isinstance(n, int) else list(n),
                    "robust": part(robust, place),
                    "natural": part(natural, place),
                },
                "best": place + 1 in best,
            }
            for place in range(length)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return tmp_path

    return make


def by_epoch(found, accuracy: str = "robust") -> dict[str, list]:
    """The columns of one accuracy, by epoch."""
    return found.frames["epochs"].query("accuracy == @accuracy").to_dict("list")


def summary(found) -> dict:
    """The summary of the robust accuracy."""
    return found.frames["summary"].to_dict("records")[0]


def test_numbers_by_hand(make_training) -> None:
    found = epochs(make_training(BY_HAND, best=(1, 3)))
    columns = by_epoch(found)
    assert found.frames["summary"]["accuracy"].tolist() == ["robust"]
    assert columns["epoch"] == [1, 2, 3, 4]
    assert columns["selected"] == [False, False, True, False]
    assert found.frame["class"].tolist() == 4 * ["0", "1", "2"]
    assert found.frame["accuracy_percent"].tolist() == np.ravel(BY_HAND).tolist()
    assert columns["average_percent"] == [30.0, 30.0, 40.0, 50.0]
    assert columns["gap_points"] == [40.0, 20.0, 30.0, 40.0]
    assert columns["class_variance"] == [round(float(np.var(row)), 4) for row in BY_HAND]
    assert (columns["best_class"], columns["best_class_percent"]) == (["1", "2", "1", "1"], [50.0, 40.0, 60.0, 70.0])
    # Classes 0 and 2 tie at the third epoch: neither was worst before, and 0 is the first.
    assert (columns["worst_class"], columns["classes_tied_for_worst"]) == (["0", "1", "0", "2"], [1, 1, 2, 1])
    assert summary(found)["changes_of_worst_class"] == 3
    assert summary(found)["worst_since_epoch"] == 3  # class 2, counting the tie
    assert (summary(found)["gap_points"], summary(found)["widest_gap_points"]) == (40.0, 40.0)
    assert (summary(found)["worst_class"], summary(found)["widest_gap_epoch"]) == ("2", 1)


def test_worst_class_persists_in_ties(make_training) -> None:
    found = epochs(make_training([[5.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert by_epoch(found)["worst_class"] == ["1", "1", "1"]
    assert (summary(found)["changes_of_worst_class"], summary(found)["worst_since_epoch"]) == (0, 1)


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 10.0, 20.0, 50.0]), min_size=4, max_size=4), min_size=1, max_size=8)
)
def test_curve_matches_brute_force(rows: list[list[float | None]]) -> None:
    rows = [[0.0 if value is None and place == 0 else value for place, value in enumerate(row)] for row in rows]
    measured = [(number, Accuracy(overall=1.0, by_class=row)) for number, row in enumerate(rows, start=5)]
    curve, found = curve_of("robust", measured, "0123", selected=5)
    ties = [[i for i, v in enumerate(row) if v == min(u for u in row if u is not None)] for row in rows]
    path = [int(row["worst_class"]) for row in curve]
    assert all(label in own for label, own in zip(path, ties, strict=True))
    assert [row["classes_tied_for_worst"] for row in curve] == [len(own) for own in ties]
    for place in range(1, len(rows)):
        assert (path[place] == path[place - 1]) == (path[place - 1] in ties[place])
    assert found["changes_of_worst_class"] == sum(path[place] != path[place - 1] for place in range(1, len(rows)))
    since = [place for place in range(len(rows)) if all(path[-1] in own for own in ties[place:])]
    assert found["worst_since_epoch"] == since[0] + 5


def test_real_training(trained: Path) -> None:
    found = epochs(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for name in ("robust", "natural"):
        parts = [line["validation"][name] for line in lines]
        columns = by_epoch(found, name)
        assert columns["average_percent"] == [part["overall"] for part in parts]
        assert columns["worst_class_percent"] == pytest.approx([part["worst"]["value"] for part in parts], abs=1e-4)
        assert columns["gap_points"] == pytest.approx([np.ptp(part["by_class"]) for part in parts], abs=1e-3)
        best = json.loads((trained / "run.json").read_text())["training"]["best_epoch"]
        assert [epoch for epoch, own in zip(columns["epoch"], columns["selected"], strict=True) if own] == [best]
    assert [len(figure.plot.data) for figure in found.figures()] == [11, 11]
    assert "25 validation images per class" in found.finding


def test_absent_classes_are_ignored(make_training) -> None:
    rows = [[None, 20.0, 40.0], [None, 30.0, 35.0]]
    found = epochs(make_training(rows, natural=rows, n=[0, 10, 12]))
    columns = by_epoch(found)
    assert (columns["worst_class"][0], columns["gap_points"][0], columns["class_variance"][0]) == ("1", 20.0, 100.0)
    assert [drawn.name for drawn in found.figures()[0].plot.data] == ["average", "1", "2"]
    assert "10 to 12 validation images" in found.finding
    assert found.about["validation_images"] == [0, 10, 12]
    assert found.frame["accuracy_percent"].tolist()[1:3] == rows[0][1:]
    assert [
        row["accuracy"] for row in json.loads(json.dumps(found.to_dict(), allow_nan=False))["frames"]["summary"]
    ] == [
        "robust",
        "natural",
    ]


def test_figure_samples_many_classes(make_training) -> None:
    rows = np.random.default_rng(0).uniform(0, 100, (50, 1000)).round(4)
    run = make_training(rows.tolist(), best=(42,))

    def shown(**settings: int) -> list[str]:
        (figure,) = epochs(run, **settings).figures()
        return [drawn.name for drawn in figure.plot.data[1:]]

    assert len(set(shown())) == 12
    assert shown() == shown(seed=0) != shown(seed=1)
    assert len(shown(sample=3)) == 3
    found = epochs(run)
    figure = found.figures()[0]
    average, *own = figure.plot.data
    # The band is the gap of all classes, not of those that are drawn.
    assert max(average.high) == rows.max()
    assert min(average.low) == rows.min()
    assert shown() == sorted(shown(), key=int)
    assert list(own[3].y) == rows[:, int(shown()[3])].tolist()
    assert len({(drawn.color, drawn.dash) for drawn in (average, *own)}) == 13
    assert "12 of 1000 classes" in figure.title
    assert list(figure.plot.marks.values()) == [42]
    columns = by_epoch(found)
    assert columns["epoch"] == list(range(1, 51))
    assert columns["selected"] == [epoch == 42 for epoch in range(1, 51)]


def test_class_names_come_from_a_matching_report(make_run, make_training, tmp_path: Path) -> None:
    make_training([[10.0, 20.0], [20.0, 10.0]])
    run = make_run("run", [[3, 1], [1, 3]], classes=["cat", "dog"])
    (run / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
    assert epochs(run).frame["class"].tolist() == ["cat", "dog", "cat", "dog"]
    other = make_run("other", [[3, 1, 0], [1, 3, 0], [0, 0, 2]])
    (other / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
    assert epochs(other).frame["class"].tolist() == ["0", "1", "0", "1"]


def test_one_class_and_one_epoch(make_training) -> None:
    found = epochs(make_training([[40.0]]))
    (row,) = found.frames["summary"].to_dict("records")
    assert (row["gap_points"], row["worst_since_epoch"], row["changes_of_worst_class"]) == (0.0, 1, 0)
    assert "the worst class, 0, has been the worst since epoch 1, after 0 changes" in found.finding
    assert found.figures()


def test_bad_input(make_training, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no metrics.jsonl; expected the directory of a training"):
        epochs(tmp_path)
    record = {"epoch": 1, "best": True, "validation": {"n": [0, 0], "robust": None, "natural": None}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(InputError, match="trained without validation images"):
        epochs(tmp_path)
    validation = {"n": [5, 5], "robust": {"overall": 1.0, "by_class": [1.0, 2.0]}, "natural": None}
    broken = [
        {},
        {"epoch": 1},
        record | {"validation": None},
        record | {"validation": {}},
        record | {"validation": validation | {"robust": {"overall": 1.0, "by_class": [1.0]}}},
        record | {"validation": validation | {"robust": {"overall": 1.0, "by_class": [None, None]}}},
        record | {"validation": validation | {"robust": {"overall": 1.0, "by_class": "ab"}}},
        record | {"validation": validation | {"n": []}},
        record | {"epoch": "first", "validation": validation},
    ]
    for one in broken:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(one) + "\n")
        with pytest.raises(InputError, match="is not a training history"):
            epochs(tmp_path)
