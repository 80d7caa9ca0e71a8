"""A real checkpoint on real CIFAR-10: results agree with those measured elsewhere, within intervals."""

from __future__ import annotations

from pathlib import Path

import pytest

import classwise as cw
from classwise.metrics import wilson

# PGD-20 with step 0.003 at 8/255 on all 10,000 test images, measured by independent code on a GPU.
MEASURED = {"trades": (81.3, 52.8), "wat": (80.3, 50.6)}


@pytest.mark.parametrize("name", MEASURED)
def test_checkpoint_agrees_with_the_measured_accuracies(name: str, real_data: Path, real_checkpoints: Path) -> None:
    report = cw.evaluate(
        "resnet18",
        "cifar10",
        weights=real_checkpoints / f"cifar10_resnet18_{name}.safetensors",
        attacks=["pgd:steps=20,step_size=0.003"],
        eps="8/255",
        per_class=5,
        device="cpu",
    )
    assert report.dataset.n == 50
    assert report.dataset.classes[3] == "cat"
    for key, expected in zip(("natural", "pgd"), MEASURED[name], strict=True):
        # 99.9%, so that the test speaks up for faults and not for chance.
        low, high = wilson(round(report[key].overall.value / 2), 50, level=0.999)
        assert 100 * low <= expected <= 100 * high
    assert report["pgd"].overall.value < report["natural"].overall.value - 15
