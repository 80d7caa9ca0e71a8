"""Groups against planted blocks, hand computation, and permutations of the labels."""

# K classes

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.analysis import AnalysisResult, groups
from classwise.analysis.groups import affinity_of, eigengap, spectral_groups
from classwise.analysis.result import table_of
from classwise.core.errors import InputError
from classwise.metrics import wilson

PLANTED = [(6, [3, 3]), (9, [3, 3, 3]), (12, [4, 8]), (12, [3, 3, 3, 3]), (20, [4, 5, 5, 6]), (30, [5] * 6)]


def planted(sizes: list[int], seed: int, between: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks, and confusion counts of classes in shuffled order that are confused within their block."""
    block = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    counts = np.where(block[:, None] == block, 6, between)
    np.fill_diagonal(counts, 100)
    return counts, block


def partition(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == one).tolist()) for one in np.unique(labels)}


def groups_in(found: AnalysisResult) -> set[frozenset[int]]:
    """The labels of each group."""
    return {frozenset(part["label"]) for _, part in found.frame.groupby("group")}


@pytest.mark.parametrize(("k", "sizes"), PLANTED)
@pytest.mark.parametrize("between", [0, 1])
def test_planted_blocks_are_found(make_run, k: int, sizes: list[int], between: int) -> None:
    counts, block = planted(sizes, seed=k, between=between)
    found = groups(make_run("run", counts.tolist()))
    assert found.about["number_chosen_by"] == "eigengap"
    assert groups_in(found) == partition(block)
    # The figure shows one group after the other, each class once.
    assert found.frame["group"].is_monotonic_increasing
    assert found.frame["position"].tolist() == list(range(k))
    assert sorted(found.frame["label"]) == list(range(k))


def test_planted_blocks_are_found_with_noise(make_run) -> None:
    random = np.random.default_rng(3)
    shares, block = planted([4, 6, 5, 5], seed=1, between=1)
    counts = random.multinomial(400, shares / shares.sum(1, keepdims=True))
    named = {str(number): np.flatnonzero(block == number).tolist() for number in range(4)}
    found = groups(make_run("run", counts.tolist()), superclasses=named)
    assert found.about["number_chosen_by"] == "superclasses"
    assert groups_in(found) == partition(block)
    (summary,) = found.frames["summary"].to_dict("records")
    assert summary["agreement_with_superclasses"] == 1.0
    assert summary["agreement_by_chance"] < 0.3
    assert summary["stability"] > 0.95
    table = found.frames["groups"]
    assert table["classes_of_main_superclass"].tolist() == table["number"].tolist()
    assert sorted(table["main_superclass"]) == ["0", "1", "2", "3"]


def test_random_groups_are_unstable(make_run) -> None:
    counts = np.random.default_rng(0).multinomial(100, [0.1] * 10, size=10)
    assert groups(make_run("run", counts.tolist()), number=3).frames["summary"]["stability"][0] < 0.5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(5, 12), st.integers(2, 4))
def test_groups_are_independent_of_class_order(seed: int, k: int, number: int) -> None:
    random = np.random.default_rng(seed)
    affinity = affinity_of(random.integers(0, 10_000, (k, k)))
    order = random.permutation(k)
    there = np.empty(k, dtype=int)
    there[order] = spectral_groups(affinity[np.ix_(order, order)], number, seed=1)
    assert partition(there) == partition(spectral_groups(affinity, number, seed=2))
    assert eigengap(affinity) == eigengap(affinity[np.ix_(order, order)])
    assert 2 <= eigengap(affinity) <= max(2, k // 2)


def test_within_group_shares_by_hand(make_run) -> None:
    counts = [[90, 8, 2, 0], [6, 94, 0, 0], [0, 1, 79, 20], [1, 0, 3, 96]]
    found = groups(make_run("run", counts), number=2)
    table = found.frames["groups"].set_index("classes")
    assert sorted(table.index) == ["0, 1", "2, 3"]
    for name, inside, errors in (("0, 1", 14, 16), ("2, 3", 23, 25)):
        row = table.loc[name]
        assert row["errors_within_percent"] == pytest.approx(100 * inside / errors)
        ends = row[["errors_within_percent_low", "errors_within_percent_high"]].tolist()
        assert ends == pytest.approx(100 * np.array(wilson(inside, errors)), abs=1e-4)
    (summary,) = found.frames["summary"].to_dict("records")
    assert summary["errors_within_percent"] == pytest.approx(100 * 37 / 41, abs=1e-3)
    assert summary["by_chance_percent"] == pytest.approx(100 / 3, abs=1e-3)
    assert "agreement_with_superclasses" not in summary
    shown = found.figures()[0].plot
    drawn = dict(zip(shown.names, (dict(zip(shown.names, row, strict=True)) for row in shown.z), strict=True))
    assert drawn["0"] == {"0": None, "1": 7.0, "2": 1.0, "3": 0.5}
    assert drawn["3"] == {"0": 0.5, "1": 0.0, "2": 11.5, "3": None}


def pair_counting(one: np.ndarray, other: np.ndarray) -> float:
    """The adjusted Rand index by definition: pairs that both partitions join, relative to the expected number."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    here, there = ({(i, j) for i, j in pairs if part[i] == part[j]} for part in (one, other))
    expected = len(here) * len(there) / len(pairs)
    return (len(here & there) - expected) / ((len(here) + len(there)) / 2 - expected)


def test_agreement_matches_all_permutations(make_run) -> None:
    counts, block = planted([4, 4], seed=0)
    named = {"one": [0, 1, 2, 3], "other": [4, 5, 6, 7]}
    found = groups(make_run("run", counts.tolist()), superclasses=named)
    member = np.repeat([0, 1], 4)
    (summary,) = found.frames["summary"].to_dict("records")
    assert summary["agreement_with_superclasses"] == pytest.approx(pair_counting(member, block), abs=1e-4)
    every = []
    for own in itertools.combinations(range(8), 4):  # each choice of four stands for equally many orders
        shuffled = np.zeros(8)
        shuffled[list(own)] = 1
        every.append(pair_counting(member, shuffled))
    assert len(every) == math.comb(8, 4)
    assert summary["agreement_by_chance"] == pytest.approx(float(np.quantile(every, 0.95)), abs=1e-4)


def test_same_seed_gives_same_result(make_run) -> None:
    counts = np.random.default_rng(0).multinomial(100, [0.1] * 10, size=10)
    run = make_run("run", counts.tolist())
    named = {"one": [0, 1, 2, 3], "other": [4, 5, 6, 7, 8, 9]}
    assert groups(run, superclasses=named, seed=5) == groups(run, superclasses=named, seed=5)


def test_absent_classes_are_in_no_group(make_run) -> None:
    counts, block = planted([3, 4], seed=2)
    counts[4] = 0
    found = groups(make_run("run", counts.tolist(), classes=list("abcdefg")))
    assert groups_in(found) == {own - {4} for own in partition(block)}
    last = found.frame.iloc[-1]
    assert (last["class"], last["label"], last["group"]) == ("e", 4, pd.NA)
    assert found.frame["group"].isna().sum() == 1
    drawn = found.figures()[0].plot
    assert set(drawn.z[-1]) == {None}
    assert {row[-1] for row in drawn.z} == {None}
    json.dumps(found.to_dict(), allow_nan=False)


def test_single_superclass_does_not_set_the_number_of_groups(make_run) -> None:
    counts, _ = planted([3, 3], seed=0)
    found = groups(make_run("run", counts.tolist()), superclasses={"all": list(range(6))})
    assert (found.about["number_chosen_by"], len(found.frames["groups"])) == ("eigengap", 2)


def test_class_without_confusion_is_not_its_own_group(make_run) -> None:
    counts, _ = planted([4, 4], seed=0)
    alone = np.zeros((9, 9), dtype=int)
    alone[:8, :8], alone[8, 8] = counts, 124
    found = groups(make_run("run", alone.tolist()))
    assert sorted(found.frames["groups"]["number"]) == [4, 5]


def test_three_classes_form_two_groups(make_run) -> None:
    found = groups(make_run("run", [[5, 5, 0], [5, 5, 0], [1, 0, 9]]))
    assert groups_in(found) == {frozenset({0, 1}), frozenset({2})}


def test_many_classes(make_run) -> None:
    block = np.arange(500) % 25
    counts = np.where(block[:, None] == block, 1, 0)
    np.fill_diagonal(counts, 5)
    found = groups(make_run("many", counts.tolist()))
    assert groups_in(found) == partition(block)
    assert len(found.finding) < 200
    assert "and 8 more" in table_of("groups", found.frames["groups"]).rows[0][0]
    assert len(found.figures()[0].html()) < 1_000_000


def test_bad_input(make_run) -> None:
    for name, counts in (("one", [[5]]), ("two", [[5, 1], [1, 5]]), ("absent", [[5, 1, 1], [1, 5, 1], [0, 0, 0]])):
        with pytest.raises(InputError, match="classes; groups need at least 3"):
            groups(make_run(name, counts))
    with pytest.raises(InputError, match="no wrong predictions under all attacks; groups need some"):
        groups(make_run("perfect", (5 * np.eye(4, dtype=int)).tolist()))
    run = make_run("run", planted([3, 3], seed=0)[0].tolist())
    for number in (0, 1, 6):
        with pytest.raises(InputError, match="6 classes can form 2 to 5 groups"):
            groups(run, number=number)
    with pytest.raises(InputError, match="unknown result 'cw'"):
        groups(run, attack="cw")


def test_finding_and_figure(make_run) -> None:
    counts, _ = planted([2, 3], seed=4)
    names = ["<i>cat</i>", "dog", "car", "truck", "ship"]
    named = {"animals": [0, 1], "transport": [2, 3, 4]}
    found = groups(make_run("run", counts.tolist(), classes=names), superclasses=named)
    assert (found.about["number_chosen_by"], len(found.frames["groups"])) == ("superclasses", 2)
    assert found.finding.startswith("Under all attacks, 100.0% [")
    assert {name for listed in found.frames["groups"]["classes"] for name in listed.split(", ")} == set(names)
    drawn = found.figures()[0].plot
    order = found.frame["label"].tolist()
    assert list(drawn.names) == [names[i] for i in order]
    shares = counts / counts.sum(1, keepdims=True)
    assert drawn.z[0][1] == pytest.approx(50 * (shares + shares.T)[order[0], order[1]], abs=1e-4)
    assert list(drawn.groups) == [found.frames["groups"]["number"][0]]
    assert found.frame.sort_values("label")["superclass"].tolist() == ["animals"] * 2 + ["transport"] * 3
