"""The weight average against its closed form, from the first step to the last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from classwise.training.averaging import WeightAverage


def counted(value: float) -> nn.Module:
    model = nn.BatchNorm1d(1)
    with torch.no_grad():
        model.weight.fill_(value)
        model.running_mean.fill_(10 * value)
        model.num_batches_tracked.fill_(int(value))
    return model


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_equals_the_recursion(decay: float) -> None:
    average = WeightAverage(counted(-100.0), decay)
    expected = -100.0
    for step in range(200):
        average.on_step(counted(float(step)))
        share = min(decay, step / (step + 9))
        expected = share * expected + (1 - share) * step
    assert average.model.weight.item() == pytest.approx(expected, rel=1e-5)
    assert average.model.running_mean.item() == pytest.approx(10 * expected, rel=1e-5)
    assert average.model.num_batches_tracked.item() == 199


def test_forgets_the_initial_weights_at_once() -> None:
    """Whatever the decay: the first step replaces them, and soon the average is near the present weights."""
    average = WeightAverage(counted(1e6), 0.9999)
    average.on_step(counted(1.0))
    assert average.model.weight.item() == 1.0


def test_saved_state_continues_where_it_stopped() -> None:
    whole, first, second = (WeightAverage(counted(0.0), 0.9) for _ in range(3))
    for step in range(30):
        whole.on_step(counted(float(step)))
        (first if step < 11 else second).on_step(counted(float(step)))
        if step == 10:
            second.load_state_dict(first.state_dict())
    assert torch.equal(whole.model.weight, second.model.weight)
    assert not second.model.training
    assert not second.model.weight.requires_grad


def test_tied_weights_count_once() -> None:
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
