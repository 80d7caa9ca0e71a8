"""Embeddings of known clusters against scikit-learn and numpy."""

# N examples, D features, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from planted import Headless, Linear, planted, thousand
from sklearn.metrics import silhouette_samples, silhouette_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from classwise.analysis import Run, embedding
from classwise.analysis.embedding import silhouettes
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.core.errors import InputError


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four classes far apart in pairs, and a fifth without images."""
    random = torch.Generator().manual_seed(0)
    centers = torch.tensor([[0.1, 0.1, 0.5, 0.5], [0.2, 0.1, 0.5, 0.5], [0.9, 0.9, 0.5, 0.5], [0.8, 0.9, 0.5, 0.5]])
    y = torch.arange(48) % 4
    x = centers[y] + 0.01 * torch.rand(48, 4, generator=random)
    model = Linear(torch.cat([centers, torch.zeros(1, 4)]), -0.5 * torch.cat([centers.square().sum(1), torch.ones(1)]))
    folder = tmp_path_factory.mktemp("clusters")
    return planted(folder, model, x.view(48, 1, 2, 2), y, ["a", "b", "c", "d", "e"], eps=0.001)


def test_silhouettes_by_hand() -> None:
    # a: 0 and 1, b: 4 and 6. For 0: a = 1, b = 5; for 1: 1, 4; for 4: 2, 3.5; for 6: 2, 5.5.
    points = np.array([[0.0], [1.0], [4.0], [6.0]])
    found = silhouettes(points, np.array([0, 0, 1, 1]))
    assert found == pytest.approx([4 / 5, 3 / 4, 1.5 / 3.5, 3.5 / 5.5])
    alone = silhouettes(points, np.array([0, 0, 0, 1]))
    assert np.isnan(alone).tolist() == [False, False, False, True]
    assert np.isnan(silhouettes(points, np.zeros(4, dtype=int))).all()
    assert np.isnan(silhouettes(points, np.arange(4))).all()


def test_numbers_match_scikit_learn(trained: Path) -> None:
    groups = {"low": [0, 1, 2, 3, 4], "high": [5, 6, 7, 8, 9]}
    found = embedding(trained, attack="pgd:steps=3", per_class=6, method="pca", superclasses=groups)
    subject = Run.open(trained)
    natural, attacked = (
        natural_outputs(subject, per_class=6),
        attacked_outputs(subject, attack="pgd:steps=3", per_class=6),
    )
    label = natural.label
    here, there = silhouette_samples(natural.features, label), silhouette_samples(attacked.features, label)
    by_class = found.frames["classes"]
    assert sorted(by_class["label"]) == list(range(10))
    for part in by_class.to_dict("records"):
        own = label == part["label"]
        assert part["natural_silhouette"] == pytest.approx(here[own].mean(), abs=1e-4)
        assert part["adversarial_silhouette"] == pytest.approx(there[own].mean(), abs=1e-4)
        assert (part["class"], part["n"]) == (str(part["label"]), 6)
    summary = found.frames["summary"].set_index("groups")
    for groups_of, of in (("class", label), ("superclass", label >= 5)):
        scores = [silhouette_score(outputs.features, of) for outputs in (natural, attacked)]
        assert summary.loc[groups_of].tolist() == pytest.approx(scores, abs=1e-4)
    together = np.concatenate([natural.features, attacked.features]).astype(float)
    left, values, _ = np.linalg.svd(together - together.mean(0), full_matrices=False)
    rows = found.frame
    assert np.abs(rows[["x", "y"]].to_numpy()) == pytest.approx(np.abs(left * values)[:, :2], abs=1e-3)
    explained = found.about["explained_variance_percent"]
    assert explained == pytest.approx(100 * (values**2 / (values**2).sum())[:2], abs=1e-3)
    assert rows["index"].tolist() == [*natural.index, *natural.index]
    assert rows["predicted"].tolist() == [*natural.predicted, *attacked.predicted]
    assert found.about["perplexity"] is None
    assert [figure.plot.x for figure in found.figures()] == [
        f"first principal component, {explained[0]:.0f}% of the variance"
    ] * 2


def test_tsne_keeps_clusters_and_is_reproducible(clusters: Run) -> None:
    found, again = (
        embedding(clusters, attack="fgsm", superclasses={"one": [0, 1], "two": [2, 3, 4]}) for _ in range(2)
    )
    assert found == again
    assert found.about["perplexity"] == 30
    places, labels = found.frame[["x", "y"]].to_numpy(), found.frame["label"].tolist()
    neighbors = KNeighborsClassifier(5).fit(places[:48], labels[:48])
    assert neighbors.score(places[48:], labels[48:]) == 1
    assert found.frames["summary"]["groups"].tolist() == ["class", "superclass"]
    assert (found.frames["summary"]["natural_silhouette"] > 0.8).all()
    absent = found.frames["classes"].set_index("class").loc["e"]
    assert np.isnan(absent[["natural_silhouette", "adversarial_silhouette"]].to_numpy()).all()
    assert absent["n"] == 0
    picture = found.figures()[0].plot
    # One legend entry per class, with a filled and an open marker.
    assert [series.name for series in picture.data] == ["a", "b", "c", "d"] * 2
    (legend,) = picture.draw(600, 10).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c", "d"]
    assert {series.symbol for series in picture.data} == {"circle", "circle-open"}
    assert len({series.color for series in picture.data}) == 4


def test_seed_changes_only_the_plane(trained: Path) -> None:
    one, other = (embedding(trained, attack="fgsm", per_class=3, seed=seed) for seed in (0, 1))
    pd.testing.assert_frame_equal(one.frames["classes"], other.frames["classes"])
    assert one.about["perplexity"] == pytest.approx(59 / 3)


def test_ten_classes_have_distinct_marks(trained: Path) -> None:
    picture = embedding(trained, attack="fgsm", per_class=2, method="pca").figures()[0].plot
    looks = {(series.color, series.symbol) for series in picture.data}
    assert len(looks) == 20


def test_thousand_classes(tmp_path: Path) -> None:
    found = embedding(thousand(tmp_path), attack="fgsm", method="pca")
    assert found.frames["classes"]["natural_silhouette"].isna().all()
    assert "no silhouette" in found.finding
    (figure,) = found.figures()
    assert not figure.plot.draw(600, 10).legends


def test_bad_input(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no last linear layer"):
        embedding(Run(trained, loaded=Headless(10)))
    with pytest.raises(InputError, match="tsne or pca"):
        embedding(trained, method="umap")
    with pytest.raises(InputError, match="positive"):
        embedding(trained, perplexity=0)
    with pytest.raises(InputError, match="at least 1"):
        embedding(trained, per_class=0)
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Linear(1, 10))
    with pytest.raises(InputError, match="cannot be embedded"):
        embedding(Run(trained, loaded=narrow), attack="fgsm")
    dead = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 10))
    dead[1].weight.data.zero_()
    with pytest.raises(InputError, match="the same features"):
        embedding(Run(trained, loaded=dead), attack="fgsm")
    x = torch.rand(10_002, 1, 2, 2)
    two = Linear(torch.randn(2, 4), torch.zeros(2))
    many = planted(tmp_path, two, x, torch.arange(10_002) % 2, ["a", "b"], attacks=["fgsm"])
    with pytest.raises(InputError, match="per_class = 5001 gives 20004 points"):
        embedding(many, per_class=5001)
