"""Losses and gradients against float64 references written here; batch-norm updates counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from classwise.objectives import OBJECTIVES, Madry, Standard, Trades
from classwise.types import ClassControls, LossTerms, Objective, reduce

K, B = 3, 8
TABLE: list[tuple[Objective, int]] = [
    # objective, training-mode passes that update batch norm
    (Standard(), 1),
    (Madry(), 1),
    (Trades(beta=2.5), 2),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, K)).double()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(B, 1, 4, 4, generator=random, dtype=torch.float64), torch.randint(K, (B,), generator=random)


def bounded(objective: Objective) -> Objective:
    return objective if objective.attack is None else replace(objective, attack=replace(objective.attack, eps=0.1))


def test_table_covers_the_registry() -> None:
    assert {type(objective) for objective, _ in TABLE} == set(OBJECTIVES.values())


@pytest.mark.parametrize(("objective", "passes"), TABLE, ids=lambda value: type(value).__name__)
def test_batch_norm_sees_just_the_stated_passes(objective: Objective, passes: int) -> None:
    model = net().train()
    x, y = batch()
    bounded(objective)(model, x, y, ClassControls.uniform(K), generator=torch.Generator().manual_seed(0))
    assert model[1].num_batches_tracked == passes
    assert model.training


def reference(objective: Objective, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Natural and adversarial terms straight from the definitions, example by example."""
    logits_nat, logits_adv = model(x), model(x_adv)
    nat, adv = [], []
    for i, label in enumerate(y.tolist()):
        p = torch.exp(logits_nat[i]) / torch.exp(logits_nat[i]).sum()
        q = torch.exp(logits_adv[i]) / torch.exp(logits_adv[i]).sum()
        if isinstance(objective, Trades):
            nat.append(-torch.log(p[label]))
            adv.append(sum(p[k] * (torch.log(p[k]) - torch.log(q[k])) for k in range(K)))
        elif isinstance(objective, Madry):
            nat.append(0 * p[0])
            adv.append(-torch.log(q[label]))
        else:
            nat.append(-torch.log(p[label]))
            adv.append(0 * p[0])
    return torch.stack(nat), torch.stack(adv)


@pytest.mark.parametrize(("objective", "passes"), TABLE, ids=lambda value: type(value).__name__)
def test_loss_and_gradient_equal_the_reference(objective: Objective, passes: int) -> None:
    x, y = batch()
    objective = bounded(objective)
    controls = ClassControls(
        weight_nat=torch.tensor([0.5, 1.0, 2.0]),
        weight_adv=torch.tensor([1.5, 0.2, 1.0]),
        eps_scale=torch.tensor([1.0, 0.5, 2.0]),
        beta_scale=torch.tensor([1.0, 3.0, 0.1]),
    )
    model = net().eval()
    terms = objective(model, x, y, controls, generator=torch.Generator().manual_seed(5))
    reduce(terms, y, controls).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]

    other = net().eval()
    x_adv = x
    if objective.attack is not None:
        random = torch.Generator().manual_seed(5)
        x_adv = objective.attack(other, x, y, eps_scale=controls.eps_scale[y], generator=random)
        radius = 0.1 * controls.eps_scale[y]
        assert ((x_adv - x).abs().flatten(1).amax(1) <= radius + 1e-9).all()
        assert ((x_adv - x).abs().flatten(1).amax(1) > 0.5 * radius).all()
    nat, adv = reference(objective, other, x, x_adv, y)
    beta = {Trades: 2.5, Madry: 1.0, Standard: 0.0}[type(objective)]
    expected = sum(
        controls.weight_nat[k] * nat[i] + beta * controls.beta_scale[k] * controls.weight_adv[k] * adv[i]
        for i, k in enumerate(y.tolist())
    )
    (expected / B).backward()
    assert torch.allclose(terms.nat, nat, atol=1e-12)
    assert torch.allclose(terms.adv, adv, atol=1e-12)
    for mine, theirs in zip(found, other.parameters(), strict=True):
        assert torch.allclose(mine, theirs.grad, atol=1e-12)


def test_reduce_is_the_plain_mean_under_uniform_controls() -> None:
    terms = LossTerms(nat=torch.tensor([1.0, 2.0]), adv=torch.tensor([3.0, 5.0]), beta=2.0)
    assert reduce(terms, torch.tensor([0, 1]), ClassControls.uniform(2)).item() == pytest.approx((7 + 12) / 2)
