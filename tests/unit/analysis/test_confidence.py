"""Confidence against scipy, scikit-learn, hand computation, and a reference PGD."""

# N examples, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import Linear, planted, thousand
from scipy.stats import bootstrap, spearmanr
from sklearn.calibration import calibration_curve
from torch import nn
from torch.nn import functional as F

from classwise.analysis import AnalysisResult, Run, confidence
from classwise.analysis.confidence import cvc
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.analysis.result import table_of
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.metrics.calibration import BINS, bin_of, expected_calibration_error


def rows_of(found: AnalysisResult, images: str) -> pd.DataFrame:
    """The classes in the order of their labels, on natural images or under the attack."""
    return found.frame.query("images == @images").sort_values("label")


def test_cvc_extremes() -> None:
    certain, even = np.eye(10)[[3]], np.full((1, 10), 0.1)
    assert cvc(certain)[0] == pytest.approx(9 / 100)
    assert cvc(even)[0] == pytest.approx(0)
    assert cvc(np.array([[0.5, 0.3, 0.2]]))[0] == pytest.approx(
        ((0.5 - 1 / 3) ** 2 + (0.3 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 3
    )


@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_cvc_of_any_output(seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.full(k, 0.3), size=5)
    found = cvc(probabilities)
    assert found == pytest.approx(probabilities.var(1))
    assert found == pytest.approx(cvc(probabilities[:, random.permutation(k)]))
    assert (found >= 0).all()
    assert (found <= (k - 1) / k**2 + 1e-12).all()


def test_calibration_error_matches_scikit_learn() -> None:
    # two bins: (0.6, 0.6667] with one of two right, (0.8667, 0.9333] with both right
    sure, right = np.array([0.62, 0.66, 0.9, 0.92]), np.array([True, False, True, True])
    assert expected_calibration_error(sure, right) == pytest.approx((abs(1.28 - 1) + abs(1.82 - 2)) / 4)
    random = np.random.default_rng(0)
    sure = random.beta(4, 2, 500)
    right = random.uniform(size=500) < sure**2
    shares, means = calibration_curve(right, sure, n_bins=BINS, strategy="uniform")
    counts = np.bincount(bin_of(sure), minlength=BINS)
    counts = counts[counts > 0]
    assert expected_calibration_error(sure, right) == pytest.approx((counts * np.abs(shares - means)).sum() / 500)


def test_bin_edges_belong_to_the_lower_bin() -> None:
    assert bin_of(np.array([0.0, 1 / 15, 0.0667, 14 / 15, 1.0])).tolist() == [0, 0, 1, 13, 14]


def test_trained_model(trained: Path) -> None:
    found = confidence(trained, attack="pgd:steps=3", per_class=8)
    subject = Run.open(trained)
    natural, attacked = (
        natural_outputs(subject, per_class=8),
        attacked_outputs(subject, attack="pgd:steps=3", per_class=8),
    )
    survived = (natural.predicted == natural.label) & (attacked.predicted == natural.label)
    robust = [100 * survived[natural.label == label].mean() for label in range(10)]
    assert rows_of(found, "natural")["robust_accuracy_percent"].tolist() == pytest.approx(robust)
    assert found.frame["robust_accuracy_percent"].is_monotonic_increasing
    for kind, seen in (("natural", natural), ("pgd:steps=3", attacked)):
        probabilities = torch.from_numpy(seen.logits).double().softmax(1).numpy()
        top, right = probabilities.max(1), seen.predicted == seen.label
        for part in rows_of(found, kind).itertuples():
            own = seen.label == part.label
            assert part.cvc == pytest.approx(probabilities[own].var(1).mean(), abs=1e-6)
            assert part.cvc_low <= part.cvc <= part.cvc_high
            assert part.confidence_percent == pytest.approx(100 * top[own].mean(), abs=1e-3)
            assert part.overconfidence_points == pytest.approx(100 * (top - right)[own].mean(), abs=1e-3)
            error = 100 * expected_calibration_error(top[own], right[own])
            assert part.ece_percent == pytest.approx(error, abs=1e-3)
        bins = found.frames["reliability"].query("images == @kind")
        assert bins["n"].sum() == 80
        shares, means = calibration_curve(right, top, n_bins=BINS, strategy="uniform")
        assert bins["accuracy_percent"].dropna().tolist() == pytest.approx(100 * shares, abs=1e-3)
        assert bins["confidence_percent"].dropna().tolist() == pytest.approx(100 * means, abs=1e-3)
    expected = spearmanr(rows_of(found, "pgd:steps=3")["cvc"], robust).statistic
    assert f"Spearman coefficient of {expected:.2f} [" in found.finding
    assert f"minus accuracy is {100 * (top - right).mean():.1f} [" in found.finding
    assert f"calibration error {100 * expected_calibration_error(top, right):.1f}%" in found.finding
    weakest = min(
        (label for label in range(10) if ((natural.predicted == label) & (natural.label == label)).any()),
        key=lambda label: robust[label],
    )
    first = natural.index[(natural.label == weakest) & (natural.predicted == weakest)][0]
    assert found.about["trajectory"] == {"index": first, "label": weakest}
    assert len(found.figures()) == 5
    assert found == confidence(trained, attack="pgd:steps=3", per_class=8)


def test_intervals_match_scipy_bootstrap(trained: Path) -> None:
    found = confidence(trained, attack="fgsm")
    seen = natural_outputs(Run.open(trained))
    for label in (0, 4):
        values = seen.probabilities[seen.label == label].var(1)
        expected = bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
        part = rows_of(found, "natural").iloc[label]
        width = expected.high - expected.low
        assert part["cvc_low"] == pytest.approx(expected.low, abs=0.08 * width)
        assert part["cvc_high"] == pytest.approx(expected.high, abs=0.08 * width)


def test_trajectory_matches_pgd(trained: Path) -> None:
    subject, index, eps, steps = Run.open(trained), 5, 0.1, (1, 3, 6)
    found = confidence(trained, attack="fgsm", per_class=2, index=index, steps=steps, inv_t=(1, 5))
    model = subject.model.eval()
    x = torch.from_numpy(subject.images.images[[index]]).float() / 255
    y = torch.from_numpy(subject.images.labels[[index]])
    assert found.about["trajectory"] == {"index": index, "label": int(y)}
    walked = {(0, 0): model(x).softmax(1)[0].tolist()}
    for inv_t in (1, 5):
        noise = ExampleNoise(0, torch.tensor([index])).uniform(x)
        x_adv = (x + eps * (2 * noise - 1)).clamp(0, 1)
        for number in range(1, 7):
            x_adv.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(inv_t * model(x_adv), y), x_adv)
            x_adv = (x_adv.detach() + 2.5 * eps / 6 * gradient.sign()).clamp(x - eps, x + eps).clamp(0, 1)
            walked[inv_t, number] = model(x_adv).softmax(1)[0].tolist()
    path = found.frames["trajectory"]
    moments = {
        moment: rows["probability_percent"].to_numpy()
        for moment, rows in path.fillna({"inverse_temperature": 0}).groupby(["inverse_temperature", "steps"])
    }
    assert list(moments) == [(0, 0), *((t, n) for t in (1, 5) for n in steps)]
    for moment, probabilities in moments.items():
        assert probabilities / 100 == pytest.approx(walked[moment], abs=1e-4 if moment[1] else 1e-6)
    highest = np.max(list(moments.values()), axis=0)
    highest[int(y)] = 0
    drawn = [series.name.split(",")[0] for series in found.figures()[-1].plot.data[::2]]
    assert drawn == [f"{int(y)} (label)", *map(str, np.argsort(-highest)[:2])]


def test_constant_model_and_absent_classes(tmp_path: Path) -> None:
    x = torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    subject = planted(
        tmp_path, Linear(torch.zeros(4, 4), torch.zeros(4)), x, torch.arange(30) % 3, ["a", "b", "c", "d"]
    )
    found = confidence(subject, attack="fgsm")
    classes = rows_of(found, "natural")
    assert classes["cvc"].tolist() == pytest.approx([0, 0, 0, np.nan], nan_ok=True)
    # always a, with a quarter of certainty: a third is right
    assert "minus accuracy is -8.3 [" in found.finding
    assert "calibration error 8.3%" in found.finding
    assert "Spearman" not in found.finding
    (full,) = found.frames["reliability"].query("images == 'natural' and n > 0").itertuples()
    assert (full.confidence_percent, full.accuracy_percent) == (25, pytest.approx(100 / 3, abs=1e-3))
    assert classes["ece_percent"].tolist() == pytest.approx([75, 25, 25, np.nan], nan_ok=True)
    assert found.about["trajectory"]["label"] == 0
    assert found.figures()
    assert table_of("classes", found.frame).rows[-1] == ["d", "3", "fgsm", *["–"] * 4, "0", "–"]


def test_thousand_classes(tmp_path: Path) -> None:
    found = confidence(thousand(tmp_path), attack="fgsm", index=7, steps=(1,), inv_t=(1,))
    assert set(found.frame["n"]) == {1}
    assert found.frame["cvc_low"].isna().all()
    assert len(found.figures()) == 5
    assert len(table_of("classes", found.frame).rows) == 20


def test_bad_input(trained: Path, make_run) -> None:
    with pytest.raises(InputError, match="1 class; at least 2"):
        confidence(make_run("one", [[5]]))
    with pytest.raises(InputError, match="steps"):
        confidence(trained, steps=(0, 1))
    with pytest.raises(InputError, match="images 0 to 696"):
        confidence(trained, attack="fgsm", per_class=1, index=697)
    with pytest.raises(InputError, match="searches a ball"):
        confidence(trained, attack="corruptions:severity=1")


class Shell(nn.Module):
    """Predicts the second class if the first pixel is far from gray."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        far = 10 * ((x[:, 0, 0, 0] - 0.5).abs() - 0.2)
        return torch.stack([-far, far], 1)


def test_image_corrected_by_the_attack_is_not_robust(tmp_path: Path) -> None:
    x = torch.full((4, 1, 2, 2), 0.5)
    x[:, 0, 0, 0] = torch.tensor([0.45, 0.0, 0.5, 0.55])  # the first is wrong, and lands at 0.72
    subject = planted(tmp_path, Shell(), x, [1, 1, 0, 0], ["near", "far"], eps=0.27)
    found = confidence(subject, attack="fgsm", index=1)
    part = rows_of(found, "fgsm").iloc[1]
    assert part["confidence_percent"] - part["overconfidence_points"] == pytest.approx(100, abs=1e-3)
    assert part["robust_accuracy_percent"] == 50


def test_model_without_correct_predictions(tmp_path: Path) -> None:
    x = torch.rand(10, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    always = Linear(torch.zeros(3, 4), torch.tensor([1.0, 0.0, 0.0]))
    subject = planted(tmp_path, always, x, 1 + torch.arange(10) % 2, ["a", "b", "c"])
    with pytest.raises(InputError, match="classifies no image correctly"):
        confidence(subject, attack="fgsm")
    assert confidence(subject, attack="fgsm", index=0).about["trajectory"]["label"] == 1
