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
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.analysis.similarity import cosines, mantel, symmetrized
from classwise.core.errors import InputError

UPPER = np.triu_indices(10, 1)


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
    for seen, images in (
        (found.natural, natural_outputs(subject, per_class=6)),
        (found.adversarial, attacked_outputs(subject, attack="pgd:steps=3", per_class=6)),
    ):
        for part, vectors in ((seen.logits, images.logits), (seen.features, images.features)):
            means = np.stack([vectors[images.label == number].mean(0) for number in range(10)])
            expected = cosine_similarity(means)
            assert np.array(part.cosines) == pytest.approx(expected, abs=1e-5)
            confused = np.array(seen.confusion)[UPPER]
            assert part.with_confusion.value == pytest.approx(
                spearmanr(np.array(part.cosines)[UPPER], confused).statistic, abs=1e-3
            )
            off = ~np.eye(10, dtype=bool)
            assert part.mean == pytest.approx([expected[i][off[i]].mean() for i in range(10)], abs=1e-5)
            accuracies = [one.value for one in subject.report[seen.images].by_class]
            assert part.with_robustness.value == pytest.approx(spearmanr(part.mean, accuracies).statistic, abs=1e-3)
    counts = np.array(subject.report.confusion["pgd"])
    rates = counts / counts.sum(1, keepdims=True)
    assert np.array(found.adversarial.confusion) == pytest.approx(50 * (rates + rates.T), abs=1e-5)
    assert len(found.figures()) == 6
    assert len(found.frame) == 4 * 45
    assert found.n == 60


def test_features_of_a_linear_model_are_pixels(tmp_path: Path) -> None:
    x = torch.tensor([[0.2, 0.0, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    model = Linear(torch.eye(4), torch.zeros(4))
    subject = planted(tmp_path, model, x.view(4, 1, 2, 2), [0, 1, 2, 3], ["a", "b", "c", "d"], eps=0.01)
    found = similarity(subject)
    half = np.sqrt(0.5)
    expected = [[1, half, 0, 0], [half, 1, half, 0], [0, half, 1, 0], [0, 0, 0, 1]]
    assert np.array(found.natural.features.cosines) == pytest.approx(np.array(expected), abs=1e-5)
    assert found.natural.logits.cosines == found.natural.features.cosines
    # This model distinguishes a and b only by random values: b's two pixels are equal.
    assert found.natural.confusion[0][1] == 50.0


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
    assert found.attack == "worst-case"
    assert found.natural.features is None
    assert found.natural.logits.cosines[4] == [None] * 5
    assert found.natural.logits.mean[4] is None
    assert found.natural.logits.with_confusion.pairs == 6
    assert len(found.figures()) == 3
    weaker = similarity(subject, attack="fgsm")
    expected = attacked_outputs(subject, attack="fgsm")
    assert np.array(weaker.adversarial.logits.cosines, dtype=float) == pytest.approx(
        cosines(expected.logits, expected.label, 5), nan_ok=True, abs=1e-5
    )


def test_thousand_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("classwise.analysis.similarity"), "ORDERS", 9)  # all of them take a minute
    found = similarity(thousand(tmp_path))
    assert found.natural.logits.with_confusion.pairs == 499_500
    assert len(found.figures()) == 4


def test_bad_input(trained: Path, make_run) -> None:
    with pytest.raises(InputError, match="1 class; at least 2"):
        similarity(make_run("one", [[5]]))
    with pytest.raises(InputError, match="unknown result"):
        similarity(trained, attack="square")
    with pytest.raises(InputError, match="at least 1"):
        similarity(trained, per_class=0)
