"""Similarity against scikit-learn and scipy, and Mantel's test against all permutations."""

# N examples, K classes, D features

from __future__ import annotations

from importlib import import_module
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import Headless, Linear, planted, thousand
from scipy.stats import spearmanr
from sklearn.metrics.pairwise import cosine_similarity

from classwise.analysis import Run, similarity
from classwise.analysis.confusion import symmetrized
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.analysis.similarity import cosines, mantel
from classwise.core.errors import InputError


def symmetric(random: np.random.Generator, k: int) -> np.ndarray:
    matrix = random.normal(size=(k, k))
    return matrix + matrix.T


def test_cosines_match_scikit_learn() -> None:
    random = np.random.default_rng(0)
    vectors, label = random.normal(size=(60, 7)), random.integers(0, 5, 60)
    means = np.stack([vectors[label == number].mean(0) for number in range(5)])
    assert cosines(vectors, label, 5) == pytest.approx(cosine_similarity(means))
    label[label == 2] = 3
    found = cosines(vectors, label, 5)
    assert np.isnan(found[2]).all()
    assert np.isnan(found).sum() == 9


def test_symmetrized_rates_by_hand() -> None:
    found = symmetrized(np.array([[6, 3, 1], [0, 4, 0], [0, 0, 0]]))
    assert found[0, 1] == found[1, 0] == pytest.approx((3 / 10 + 0 / 4) / 2)
    assert np.isnan(found[2]).all()


def test_trained_model(trained: Path) -> None:
    found = similarity(trained, attack="pgd", per_class=6)
    subject = Run.open(trained)
    outputs = {
        "pgd": attacked_outputs(subject, attack="pgd:steps=3", per_class=6),
        "natural": natural_outputs(subject, per_class=6),
    }
    heatmaps = iter(found.figures())
    rows = iter(found.frames["correlations"].to_dict("records"))
    for name, images in outputs.items():
        counts = np.array(subject.report.confusion[name])
        rates = counts / counts.sum(1, keepdims=True)
        confused = 50 * (rates + rates.T)
        accuracies = [one.value for one in subject.report[name].by_class]
        for what, vectors in (("logits", images.logits), ("features", images.features)):
            means = np.stack([vectors[images.label == number].mean(0) for number in range(10)])
            expected = cosine_similarity(means)
            pairs = found.frame.query(f"images == '{name}' and similarity_of == '{what}'")
            place = pairs["label"], pairs["other_label"]
            assert pairs["cosine"].to_numpy() == pytest.approx(expected[place], abs=1e-5)
            assert pairs["cosine"].is_monotonic_decreasing
            assert pairs["confused_percent"].to_numpy() == pytest.approx(confused[place], abs=1e-5)
            drawn = np.array(next(heatmaps).plot.z, dtype=float)
            np.fill_diagonal(expected, np.nan)
            assert drawn == pytest.approx(expected, abs=1e-3, nan_ok=True)
            row = next(rows)
            assert (row["images"], row["similarity_of"], row["pairs"]) == (name, what, 45)
            assert row["spearman_with_confusion"] == pytest.approx(
                spearmanr(pairs["cosine"], pairs["confused_percent"]).statistic, abs=1e-3
            )
            assert row["spearman_with_accuracy"] == pytest.approx(
                spearmanr(np.nanmean(expected, axis=1), accuracies).statistic, abs=1e-3
            )
    assert len(found.figures()) == 6
    assert len(found.frame) == 4 * 45
    assert found.about["n"] == 60


def test_features_of_a_linear_model_are_pixels(tmp_path: Path) -> None:
    x = torch.tensor([[0.2, 0.0, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    model = Linear(torch.eye(4), torch.zeros(4))
    subject = planted(tmp_path, model, x.view(4, 1, 2, 2), [0, 1, 2, 3], ["a", "b", "c", "d"], eps=0.01)
    found = similarity(subject)
    half = np.sqrt(0.5)
    natural = found.frame.query("images == 'natural'").set_index(["similarity_of", "class", "other_class"])
    for what in ("logits", "features"):
        expected = {("a", "b"): half, ("a", "c"): 0, ("a", "d"): 0, ("b", "c"): half, ("b", "d"): 0, ("c", "d"): 0}
        assert natural.loc[what]["cosine"].to_dict() == pytest.approx(expected, abs=1e-5)
    # This model distinguishes a and b only by random values: b's two pixels are equal.
    assert natural.loc["logits", "a", "b"]["confused_percent"] == 50.0


def test_mantel_matches_all_permutations() -> None:
    random = np.random.default_rng(3)
    one, other = symmetric(random, 5), symmetric(random, 5)
    upper = np.triu_indices(5, 1)
    value = spearmanr(one[upper], other[upper]).statistic
    every = [spearmanr(one[upper], other[np.ix_(order, order)][upper]).statistic for order in permutations(range(5))]
    exact = np.mean(np.abs(every) >= abs(value) - 1e-9)
    found = mantel(one, other)
    assert found.value == pytest.approx(value, abs=1e-4)
    # 999 draws of the exact share
    assert found.p == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 999) + 1 / 1000)
    assert mantel(one, other) == found


def test_mantel_extremes() -> None:
    random = np.random.default_rng(0)
    one = symmetric(random, 9)
    same = mantel(one, np.exp(one))
    assert (same.value, same.p, same.pairs) == (1.0, 0.001, 36)
    assert mantel(one, -one).value == -1.0
    assert mantel(one, np.ones((9, 9))).value is None
    assert mantel(one[:2, :2], one[:2, :2]).value is None


def test_p_values_are_uniform_under_the_null() -> None:
    random = np.random.default_rng(1)
    values = [mantel(symmetric(random, 7), symmetric(random, 7), seed).p for seed in range(60)]
    assert 0.3 < np.mean(np.array(values) < 0.5) < 0.7
    assert np.mean(np.array(values) < 0.05) < 0.2


@given(st.integers(0, 2**32 - 1), st.integers(3, 8))
def test_coefficient_is_independent_of_class_order(seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    one, other, order = symmetric(random, k), symmetric(random, k), random.permutation(k)
    turned = mantel(one[np.ix_(order, order)], other[np.ix_(order, order)])
    assert turned.value == pytest.approx(mantel(one, other).value, abs=2e-4)


def test_absent_classes_headless_models_and_several_attacks(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, 3, 3, generator=random)
    model = Headless(5, channels=2)
    subject = planted(
        tmp_path, model, x, torch.arange(40) % 4, ["a", "b", "c", "d", "e"], attacks=["fgsm", "pgd:steps=5"], eps=0.2
    )
    found = similarity(subject)
    assert found.about["attack"] == "worst-case"
    assert set(found.frame["similarity_of"]) == {"logits"}
    natural = found.frame.query("images == 'natural'")
    assert set(natural["class"][natural["cosine"].isna()]) == {"e"}
    assert natural["cosine"].count() == 6
    assert found.frames["correlations"]["pairs"].tolist() == [6, 6]
    assert len(found.figures()) == 3
    weaker = similarity(subject, attack="fgsm").frame.query("images == 'fgsm'")
    outputs = attacked_outputs(subject, attack="fgsm")
    expected = cosines(outputs.logits, outputs.label, 5)[weaker["label"], weaker["other_label"]]
    assert weaker["cosine"].to_numpy() == pytest.approx(expected, nan_ok=True, abs=1e-5)


def test_thousand_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("classwise.analysis.similarity"), "ORDERS", 9)  # all of them take a minute
    found = similarity(thousand(tmp_path))
    assert found.frames["correlations"]["pairs"].tolist() == [499_500] * 4
    assert len(found.figures()) == 4


def test_bad_input(trained: Path, make_run) -> None:
    with pytest.raises(InputError, match="1 class; at least 2"):
        similarity(make_run("one", [[5]]))
    with pytest.raises(InputError, match="unknown result"):
        similarity(trained, attack="square")
    with pytest.raises(InputError, match="at least 1"):
        similarity(trained, per_class=0)
