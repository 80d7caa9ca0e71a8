"""Adversarial weight perturbation: the gradient at the perturbed weights by hand, and no other changes."""

# B batch, K classes

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import classwise as cw
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, Objective
from classwise.objectives import Madry, Standard
from classwise.policies import Uniform
from classwise.training.engine import Engine
from classwise.training.weight_perturbation import WeightPerturbation

GAMMA = 0.3


def engine_for(model: nn.Module, objective: Objective, gamma: float | None = GAMMA) -> Engine:
    return Engine(
        model=model,
        objective=objective,
        policy=Uniform(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        average=None,
        precision="fp32",
        clip=None,
        awp=None if gamma is None else WeightPerturbation(gamma=gamma),
    )


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(6, 1, 2, 2, generator=random, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()


def test_step_uses_gradient_at_perturbed_weights() -> None:
    """w - lr · ∇L(w + gamma ‖w‖ g / ‖g‖); the bias uses the gradient at this point but is not perturbed."""
    model, (x, y) = linear(), batch()
    weight, bias = (parameter.detach().clone() for parameter in model.parameters())
    flat = x.flatten(1)

    def gradient(at: Tensor) -> tuple[Tensor, Tensor]:
        error = (torch.softmax(flat @ at.T + bias, 1) - F.one_hot(y, 3)) / len(y)
        return error.T @ flat, error.sum(0)

    ascent = gradient(weight)[0]
    pushed = weight + GAMMA * weight.norm() / ascent.norm() * ascent
    expected_weight, expected_bias = gradient(pushed)
    engine_for(model, Standard()).step(x, y, ClassControls.uniform(3), None)
    moved_weight, moved_bias = model.parameters()
    assert torch.allclose(moved_weight, weight - 0.1 * expected_weight, atol=1e-12)
    assert torch.allclose(moved_bias, bias - 0.1 * expected_bias, atol=1e-12)


def test_perturbation_begins_at_its_epoch(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 2, "validation_per_class": 5, "attack": {"steps": 1}, "data.per_class": 20}
    pushes = [None, {"gamma": 0.1}, {"gamma": 0.1, "begin": 2}, {"gamma": 0.1, "begin": 3}]
    runs = [cw.train("digits/madry", out=tmp_path / str(number), awp=awp, **quick) for number, awp in enumerate(pushes)]
    losses = [[record["loss"] for record in run.outcome.history] for run in runs]
    assert losses[0] == losses[3]
    assert losses[2][0] == losses[0][0] != losses[1][0]
    assert losses[2][1] != losses[0][1]
    with pytest.raises(InputError, match="begin must be at least 1, got 0"):
        WeightPerturbation(begin=0)


def test_attack_uses_unperturbed_weights() -> None:
    """The adversarial images of a step with and without the perturbation are the same."""
    x, y = batch()
    asked: list[Tensor] = []

    class Watching(Madry):
        def terms(self, model, x, x_adv, y):  # type: ignore[no-untyped-def]
            asked.append(x_adv)
            return super().terms(model, x, x_adv, y)

    objective = Watching(attack=Madry().attack.__class__(steps=3, eps=0.2))
    for gamma in (None, GAMMA):
        engine = engine_for(linear(), objective, gamma)
        engine.step(x, y, ClassControls.uniform(3), torch.Generator().manual_seed(0))
    assert len(asked) == 3  # one pass without perturbation; with it, one to compute it and one to descend
    assert torch.equal(asked[0], asked[1])
    assert torch.equal(asked[1], asked[2])


def test_statistics_are_those_of_one_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 3)).double()
    before = copy.deepcopy(model.state_dict())
    x, y = batch()
    perturbation = WeightPerturbation(gamma=GAMMA)
    model.train()
    with perturbation.perturbed(model, lambda: F.cross_entropy(model(x), y)):
        inside = copy.deepcopy(model.state_dict())
        assert inside["1.num_batches_tracked"] == 0
        assert torch.equal(inside["1.running_mean"], before["1.running_mean"])
        for name in ("0.weight", "3.weight"):
            share = (inside[name] - before[name]).norm() / before[name].norm()
            assert float(share) == pytest.approx(GAMMA)
        for name in ("0.bias", "1.weight", "1.bias", "3.bias"):
            assert torch.equal(inside[name], before[name])
        worse = F.cross_entropy(model(x), y)
    better = F.cross_entropy(model(x), y)
    assert worse.item() > better.item()
    for name in ("0.weight", "3.weight"):
        assert torch.equal(model.state_dict()[name], before[name])


def test_weights_are_restored_after_errors() -> None:
    model, (x, y) = linear(), batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError), WeightPerturbation().perturbed(model, lambda: F.cross_entropy(model(x), y)):
        raise ZeroDivisionError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_zero_gamma_raises() -> None:
    with pytest.raises(InputError, match="gamma must be positive, got 0"):
        WeightPerturbation(gamma=0)
