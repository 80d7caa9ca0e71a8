"""Optimizers: one step compared with the formula, and weight decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.training.optimizers import OPTIMIZERS


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("decay_vectors", [True, False])
def test_weight_decay_of_weights_and_vectors(name: str, decay_vectors: bool) -> None:
    """A step on gradients of zero is weight decay alone: w · (1 - lr · decay)."""
    net = model()
    before = {key: value.detach().clone() for key, value in net.named_parameters()}
    settings: Any = build("optimizer", OPTIMIZERS, f"{name}:lr=0.1,weight_decay=0.5,decay_vectors={decay_vectors}")
    optimizer = settings.build(net.parameters())
    for value in net.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    for key, value in net.named_parameters():
        decays = decay_vectors or value.dim() > 1
        assert torch.allclose(value, before[key] * (0.95 if decays else 1.0), atol=1e-12), key
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_momentum_by_hand() -> None:
    """v = 1, then 0.9 · 1 + 2; w falls by lr times either."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = build("optimizer", OPTIMIZERS, "sgd:lr=0.1,momentum=0.9,weight_decay=0").build([weight])
    for gradient, expected in ((1.0, -0.1), (2.0, -0.1 - 0.29)):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        assert weight.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sgd:lr=0", "lr must be positive"),
        ("adam:weight_decay=-1", "weight_decay must not be negative"),
        ("sgd:momentum=1", "momentum must lie in"),
        ("sgd:momentum=0,nesterov=true", "nesterov needs a momentum"),
    ],
)
def test_impossible_settings(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("optimizer", OPTIMIZERS, spec)
