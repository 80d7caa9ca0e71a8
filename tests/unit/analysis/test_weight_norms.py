"""Weight norms against numpy and scipy, for all kinds of heads."""

# K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from planted import Headless, Linear, planted, thousand
from scipy.stats import pearsonr, spearmanr
from torch import nn

from classwise.analysis import AnalysisResult, Run, weight_norms
from classwise.core.errors import InputError
from classwise.models import MODELS
from classwise.models.normalize import normalized

NAMES = ["ant", "bee", "cow", "dog", "eel"]


def lengths_run(folder: Path, absent: int | None = None) -> Run:
    """Five classes whose weight vectors have norms 1 to 5."""
    weight = torch.zeros(5, 16)
    for label, long in enumerate((1.0, 2.0, 3.0, 4.0, 5.0)):
        weight[label, 2 * label], weight[label, 2 * label + 1] = 0.6 * long, 0.8 * long
    x = torch.full((100, 1, 4, 4), 0.5)
    y = torch.arange(100) % 5
    for row, label in enumerate(y.tolist()):
        x[row, 0].view(-1)[2 * label : 2 * label + 2] += 0.04 + 0.002 * row / 5 * (1 + label)
    kept = y != (-1 if absent is None else absent)
    model = Linear(weight, -0.7 * torch.arange(1.0, 6.0))
    return planted(folder, model, x[kept], y[kept], NAMES, attacks=["pgd:steps=5"], eps=0.05)


def by_label(found: AnalysisResult, model: str) -> pd.DataFrame:
    """The classes of one model in the order of their labels."""
    return found.frame.query("model == @model").sort_values("label")


def coefficient(found: AnalysisResult, name: str, accuracy: str = "worst-case") -> pd.Series:
    """A coefficient of the first model."""
    rows = found.frames["correlations"].query("coefficient == @name and accuracy == @accuracy")
    return rows.iloc[0]


def test_known_weights(tmp_path: Path) -> None:
    subject = lengths_run(tmp_path)
    found = weight_norms(subject)
    assert found.about["layers"] == [{"name": "layer", "features": 16}]
    assert "although" not in found.finding
    part = by_label(found, "Linear")
    assert part["weight_norm"].tolist() == pytest.approx([1, 2, 3, 4, 5])
    assert part["weight_norm_scaled"].tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    robust = np.array([part.value for part in subject.report["worst-case"].by_class], dtype=float)
    assert np.ptp(robust) > 0
    assert found.frame["robust_accuracy_percent"].tolist() == sorted(robust)
    assert part["robust_accuracy_scaled"].tolist() == pytest.approx((robust - robust.min()) / np.ptp(robust))
    expected = pearsonr([1, 2, 3, 4, 5], robust)
    pearson = coefficient(found, "pearson")
    assert pearson["value"] == pytest.approx(expected.statistic, abs=1e-4)
    assert pearson["p_value"] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (pearson["value_low"], pearson["value_high"]) == pytest.approx((interval.low, interval.high), abs=1e-4)
    spearman = coefficient(found, "spearman")["value"]
    assert spearman == pytest.approx(spearmanr([1, 2, 3, 4, 5], robust).statistic, abs=1e-4)
    assert f"Spearman coefficient of {spearman:.2f} [" in found.finding


def test_trained_models(trained: Path) -> None:
    found = weight_norms(trained, trained, attack="pgd")
    assert found.about["models"] == ["trained", "trained (2)"]
    one, other = (by_label(found, name).drop(columns="model") for name in found.about["models"])
    assert one.to_numpy().tolist() == other.to_numpy().tolist()
    subject = Run.open(trained)
    head = [module for module in subject.model.modules() if isinstance(module, nn.Linear)][-1]
    norms = np.linalg.norm(head.weight.detach().double().numpy(), axis=1)
    assert one["weight_norm"].tolist() == pytest.approx(norms)
    for name in ("natural", "pgd"):
        accuracies = [part.value for part in subject.report[name].by_class]
        for coefficient_of in (pearsonr, spearmanr):
            value = coefficient(found, coefficient_of.__name__.removesuffix("r"), name)["value"]
            assert value == pytest.approx(coefficient_of(norms, accuracies).statistic, abs=1e-4)
    assert len(found.figures()) == 4
    assert len(found.frame) == 20


@pytest.mark.parametrize("head", ["linear", "hypersphere"])
def test_wrapped_models_and_hypersphere_heads(trained: Path, head: str) -> None:
    inner = MODELS["digits-cnn"](num_classes=10, in_channels=1, head=head)
    wrapped = nn.Sequential(normalized(inner, (0.5,), (0.2,)))
    found = weight_norms(Run(trained, loaded=wrapped))
    last = [module for module in inner.modules() if isinstance(module, nn.Linear)][-1]
    norms = by_label(found, "trained")["weight_norm"]
    assert norms.tolist() == pytest.approx(last.weight.detach().norm(dim=1).tolist())
    assert ("although the layer divides" in found.finding) == (head == "hypersphere")


def test_absent_class_and_equal_norms(tmp_path: Path) -> None:
    subject = lengths_run(tmp_path / "absent", absent=3)
    found = weight_norms(subject)
    part = found.frame.iloc[-1]
    assert (part["label"], part["weight_norm"]) == (3, pytest.approx(4))
    assert part[["robust_accuracy_percent", "robust_accuracy_scaled"]].isna().all()
    assert coefficient(found, "pearson")["classes"] == 4
    assert found.figures()
    flat = Linear(torch.zeros(5, 16), torch.tensor([1.0, 0, 0, 0, 0]))
    found = weight_norms(Run(subject.path, loaded=flat))
    assert np.isnan(coefficient(found, "pearson")["value"])
    assert found.frame["weight_norm_scaled"].isna().all()
    assert "cannot be correlated" in found.finding
    assert found.figures()


def test_thousand_classes(tmp_path: Path) -> None:
    found = weight_norms(thousand(tmp_path))
    assert len(found.frame) == 1000
    assert len(found.figures()) == 3


def test_bad_input(trained: Path, tmp_path: Path, make_run) -> None:
    with pytest.raises(InputError, match="no last linear layer"):
        weight_norms(Run(trained, loaded=Headless(10)))
    with pytest.raises(InputError, match="1 to 2"):
        weight_norms(trained, trained, trained)
    with pytest.raises(InputError, match="other classes"):
        weight_norms(trained, lengths_run(tmp_path / "five"))
    with pytest.raises(InputError, match="1 class; at least 2"):
        weight_norms(make_run("one", [[5]]))
    with pytest.raises(InputError, match="unknown result"):
        weight_norms(trained, attack="square")
