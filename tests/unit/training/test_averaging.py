"""Weight averages over steps and over epochs, compared with closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from classwise.core.errors import InputError
from classwise.core.types import ClassStats
from classwise.training.averaging import FAWA, FAWASettings, WeightAverage
from each import for_each


def counted(value: float) -> nn.Module:
    model = nn.BatchNorm1d(1)
    with torch.no_grad():
        model.weight.fill_(value)
        model.running_mean.fill_(10 * value)
        model.num_batches_tracked.fill_(int(value))
    return model


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_average_equals_the_recursion(decay: float) -> None:
    average = WeightAverage(counted(-100.0), decay)
    expected = -100.0
    for step in range(200):
        average.on_step(counted(float(step)))
        share = min(decay, step / (step + 9))
        expected = share * expected + (1 - share) * step
    assert average.model.weight.item() == pytest.approx(expected, rel=1e-5)
    assert average.model.running_mean.item() == pytest.approx(10 * expected, rel=1e-5)
    assert average.model.num_batches_tracked.item() == 199


def test_first_step_replaces_initial_weights() -> None:
    """For any decay, the first step replaces them, and the average is soon close to the current weights."""
    average = WeightAverage(counted(1e6), 0.9999)
    average.on_step(counted(1.0))
    assert average.model.weight.item() == 1.0


def test_average_state_round_trip() -> None:
    whole, first, second = (WeightAverage(counted(0.0), 0.9) for _ in range(3))
    for step in range(30):
        whole.on_step(counted(float(step)))
        (first if step < 11 else second).on_step(counted(float(step)))
        if step == 10:
            second.load_state_dict(first.state_dict())
    assert torch.equal(whole.model.weight, second.model.weight)
    assert not second.model.training
    assert not second.model.weight.requires_grad


def test_tied_weights_are_averaged_once() -> None:
    class Tied(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.one = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.one.weight, value)
            self.two = self.one

    average = WeightAverage(Tied(0.0), 0.5)
    average.on_step(Tied(1.0))
    average.on_step(Tied(2.0))
    assert average.model.two.weight.item() == pytest.approx(0.1 * 1 + 0.9 * 2)


def verdicts(*correct: int) -> ClassStats:
    """Ten examples per class with the given number correct under attack; no examples for negative numbers."""
    made = ClassStats.zeros(len(correct))
    made.n_adv += torch.tensor([0 if right < 0 else 10 for right in correct])
    made.correct_adv += torch.tensor([max(right, 0) for right in correct])
    return made


def test_only_epochs_with_good_worst_class_are_included() -> None:
    """d = 1/2, threshold 0.3. Epoch 1 is too early, 2 has a class at 0.2, 3 begins: 3. Epoch 4 has none: still 3.
    Epoch 5: (3 + 5) / 2 = 4. Epoch 6, whose weak class has no examples: (4 + 6) / 2 = 5."""
    average = FAWA(counted(-100.0), FAWASettings(decay=0.5, threshold=0.3, begin=2))
    expected = [None, None, 3.0, 3.0, 4.0, 5.0]
    epochs = [verdicts(9, 9), verdicts(2, 9), verdicts(3, 9), verdicts(9, 0), verdicts(4, 4), verdicts(-1, 5)]
    for epoch, (val, value) in enumerate(zip(epochs, expected, strict=True), 1):
        average.on_step(counted(1000.0))  # steps do not matter
        average.on_epoch(counted(float(epoch)), val)
        found = None if average.model is None else average.model.weight.item()
        assert found == value
    assert average.model is not None
    assert average.model.running_mean.item() == 50.0
    assert average.model.num_batches_tracked.item() == 6


@for_each("percent", range(101))
def test_threshold_is_inclusive(percent: int) -> None:
    average = FAWA(counted(0.0), FAWASettings(threshold=percent / 100))
    val = ClassStats.zeros(1)
    val.n_adv += 100
    val.correct_adv += percent
    average.on_epoch(counted(1.0), val)
    assert average.counts["included"] == 1


def test_gated_average_state_round_trip() -> None:
    whole, first, second = (FAWA(counted(0.0), FAWASettings(begin=3, threshold=0.5)) for _ in range(3))
    for epoch in range(1, 9):
        val = verdicts(epoch + 1, 9)
        whole.on_epoch(counted(float(epoch)), val)
        (first if epoch < 5 else second).on_epoch(counted(float(epoch)), val)
        if epoch == 4:
            second.load_state_dict(first.state_dict())
    assert whole.model is not None
    assert second.model is not None
    assert torch.equal(whole.model.weight, second.model.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 1}, "decay must lie in"),
        ({"threshold": 20}, r"threshold must lie in \[0, 1\], got 20"),
        ({"begin": 0}, "begin must be at least 1"),
    ],
)
def test_invalid_fawa_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FAWASettings(**settings)  # type: ignore[arg-type]
