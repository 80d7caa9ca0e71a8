"""Confidence against scipy, scikit-learn, hand computation, and a reference PGD."""

# N examples, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import Linear, planted, thousand
from scipy.stats import bootstrap, spearmanr
from sklearn.calibration import calibration_curve
from torch import nn
from torch.nn import functional as F

from classwise.analysis import Run, confidence
from classwise.analysis.confidence import cvc
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.analysis.result import table_of
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.metrics.calibration import BINS, bin_of, expected_calibration_error


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
    assert [part.value for part in found.robust] == pytest.approx(robust)
    for one, seen in ((found.natural, natural), (found.adversarial, attacked)):
        probabilities = torch.from_numpy(seen.logits).double().softmax(1).numpy()
        top, right = probabilities.max(1), seen.predicted == seen.label
        for label, part in enumerate(one.by_class):
            own = seen.label == label
            assert part.cvc.value == pytest.approx(probabilities[own].var(1).mean(), abs=1e-6)
            assert part.cvc.low <= part.cvc.value <= part.cvc.high
            assert part.calibration.accuracy.value == pytest.approx(100 * right[own].mean())
            assert part.calibration.confidence == pytest.approx(100 * top[own].mean(), abs=1e-3)
            assert part.calibration.overconfidence.value == pytest.approx(100 * (top - right)[own].mean(), abs=1e-3)
            assert part.calibration.ece == pytest.approx(
                100 * expected_calibration_error(top[own], right[own]), abs=1e-3
            )
        assert sum(part.accuracy.n for part in one.bins) == 80
        shares, means = calibration_curve(right, top, n_bins=BINS, strategy="uniform")
        filled = [part for part in one.bins if part.accuracy.n]
        assert [part.accuracy.value for part in filled] == pytest.approx(100 * shares, abs=1e-3)
        assert [part.confidence for part in filled] == pytest.approx(100 * means, abs=1e-3)
        expected = spearmanr([part.cvc.value for part in one.by_class], robust).statistic
        assert one.cvc_with_robustness.value == pytest.approx(expected, abs=1e-4)
    weakest = min(
        (label for label in range(10) if ((natural.predicted == label) & (natural.label == label)).any()),
        key=lambda label: robust[label],
    )
    first = natural.index[(natural.label == weakest) & (natural.predicted == weakest)][0]
    assert (found.trajectory.index, found.trajectory.label) == (first, weakest)
    assert len(found.figures()) == 5
    assert found == confidence(trained, attack="pgd:steps=3", per_class=8)


def test_intervals_match_scipy_bootstrap(trained: Path) -> None:
    found = confidence(trained, attack="fgsm")
    seen = natural_outputs(Run.open(trained))
    for label in (0, 4):
        values = seen.probabilities[seen.label == label].var(1)
        expected = bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
        part = found.natural.by_class[label].cvc
        width = expected.high - expected.low
        assert part.low == pytest.approx(expected.low, abs=0.08 * width)
        assert part.high == pytest.approx(expected.high, abs=0.08 * width)


def test_trajectory_matches_pgd(trained: Path) -> None:
    subject, index, eps, steps = Run.open(trained), 5, 0.1, (1, 3, 6)
    found = confidence(trained, attack="fgsm", per_class=2, index=index, steps=steps, inv_t=(1, 5)).trajectory
    model = subject.model.eval()
    x = torch.from_numpy(subject.images.images[[index]]).float() / 255
    y = torch.from_numpy(subject.images.labels[[index]])
    assert found.label == int(y)
    assert found.natural == pytest.approx(model(x).softmax(1)[0].tolist(), abs=1e-6)
    assert found.step_size == pytest.approx(2.5 * eps / 6)
    walked = {}
    for inv_t in (1, 5):
        noise = ExampleNoise(0, torch.tensor([index])).uniform(x)
        x_adv = (x + eps * (2 * noise - 1)).clamp(0, 1)
        for number in range(1, 7):
            x_adv.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(inv_t * model(x_adv), y), x_adv)
            x_adv = (x_adv.detach() + 2.5 * eps / 6 * gradient.sign()).clamp(x - eps, x + eps).clamp(0, 1)
            walked[inv_t, number] = model(x_adv).softmax(1)[0].tolist()
    assert [(moment.inv_t, moment.steps) for moment in found.moments] == [(t, n) for t in (1, 5) for n in steps]
    for moment in found.moments:
        assert moment.probabilities == pytest.approx(walked[moment.inv_t, moment.steps], abs=1e-4)
    highest = np.max([found.natural, *(moment.probabilities for moment in found.moments)], axis=0)
    highest[found.label] = 0
    assert found.rivals == np.argsort(-highest)[:2].tolist()


def test_constant_model_and_absent_classes(tmp_path: Path) -> None:
    x = torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    subject = planted(
        tmp_path, Linear(torch.zeros(4, 4), torch.zeros(4)), x, torch.arange(30) % 3, ["a", "b", "c", "d"]
    )
    found = confidence(subject, attack="fgsm")
    assert [part.cvc.value for part in found.natural.by_class] == [0, 0, 0, None]
    # always a, with a quarter of certainty: a third is right
    assert found.natural.overall.ece == pytest.approx(100 * (1 / 3 - 1 / 4), abs=1e-3)
    assert found.natural.overall.overconfidence.value == pytest.approx(100 * (1 / 4 - 1 / 3), abs=1e-3)
    assert [part.calibration.ece for part in found.natural.by_class] == [75, 25, 25, None]
    assert found.natural.cvc_with_robustness.value is None
    assert found.trajectory.label == 0
    assert found.figures()
    assert table_of("classes", found.frame).rows[-1] == ["d", "3", "fgsm", *["–"] * 4, "0"]


def test_thousand_classes(tmp_path: Path) -> None:
    found = confidence(thousand(tmp_path), attack="fgsm", index=7, steps=(1,), inv_t=(1,))
    assert found.natural.by_class[0].cvc.n == 1
    assert found.natural.by_class[0].cvc.low is None
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
    assert found.adversarial.by_class[1].calibration.accuracy.value == 100
    assert found.robust[1].value == 50


def test_model_without_correct_predictions(tmp_path: Path) -> None:
    x = torch.rand(10, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    always = Linear(torch.zeros(3, 4), torch.tensor([1.0, 0.0, 0.0]))
    subject = planted(tmp_path, always, x, 1 + torch.arange(10) % 2, ["a", "b", "c"])
    with pytest.raises(InputError, match="classifies no image correctly"):
        confidence(subject, attack="fgsm")
    assert confidence(subject, attack="fgsm", index=0).trajectory.label == 1
