"""Policies: hand-computed sequences, permuted classes, saved state, absent classes, any K."""

from __future__ import annotations

import math

import pytest
import torch

from classwise.errors import InputError
from classwise.policies import POLICIES, WAT, Uniform
from classwise.types import ClassControls, ClassStats, LossTerms, Policy, Task

TABLE: list[Policy] = [Uniform(), WAT(eta=0.3)]


def stats(losses: list[float], n: list[int]) -> ClassStats:
    """Statistics with the given mean losses."""
    made = ClassStats.zeros(len(losses))
    made.n += torch.tensor(n)
    made.loss += torch.tensor(losses, dtype=torch.float64) * made.n
    return made


def task(num_classes: int) -> Task:
    return Task(classes=tuple(f"class {label}" for label in range(num_classes)), beta=6.0)


def fresh(policy: Policy) -> Policy:
    return type(policy)(**({"eta": policy.eta} if isinstance(policy, WAT) else {}))


def drive(policy: Policy, num_classes: int, epochs: range, order: torch.Tensor | None = None) -> ClassControls:
    order = torch.arange(num_classes) if order is None else order
    controls = ClassControls.uniform(num_classes)
    for epoch in epochs:
        losses = torch.rand(num_classes, generator=torch.Generator().manual_seed(epoch)) * 3
        val = stats(losses[order].tolist(), [20] * num_classes)
        controls = policy.on_epoch_end(stats([1.0] * num_classes, [50] * num_classes), val, epoch) or controls
    return controls


def test_table_covers_the_registry() -> None:
    assert {type(policy) for policy in TABLE} == set(POLICIES.values())


def test_wat_weights_by_hand() -> None:
    """K = 2, eta = ln 2, so that each unit of cumulated loss doubles a weight: all numbers are exact fractions.

    Epoch 1: class losses (1, 3), average 2; costs (1, 3, 2); softmax 2:8:4 of 14; class weights 2·2/14 + 4/14 = 8/14
    and 2·8/14 + 4/14 = 20/14. Epoch 2: losses (3, 1), average 2; costs (4, 4, 4): all weights one. Epoch 3: losses
    (0, 2), average 1; costs (4, 6, 5); the ratio 1:4:2 of 7; weights 2·1/7 + 2/7 = 4/7 and 2·4/7 + 2/7 = 10/7.
    """
    policy = WAT(eta=math.log(2))
    assert torch.equal(policy.start(task(2)).weight_nat, torch.ones(2))
    train = stats([1.0, 1.0], [40, 40])
    expected = [(8 / 14, 20 / 14), (1.0, 1.0), (4 / 7, 10 / 7)]
    for epoch, (losses, weights) in enumerate(zip([[1.0, 3.0], [3.0, 1.0], [0.0, 2.0]], expected, strict=True), 1):
        controls = policy.on_epoch_end(train, stats(losses, [10, 10]), epoch)
        assert controls.weight_nat.tolist() == pytest.approx(weights)
        assert torch.equal(controls.weight_adv, controls.weight_nat)
        assert torch.equal(controls.eps_scale, torch.ones(2))


def test_wat_uses_class_means_where_classes_differ_in_size() -> None:
    """Σ_k w_k L_k with L_k a class mean: on classes of 30 and 10 images the weights are w_k · 40 / n_k + w_avg."""
    policy = WAT(eta=math.log(2))
    policy.start(task(2))
    controls = policy.on_epoch_end(stats([1.0, 1.0], [30, 10]), stats([1.0, 3.0], [10, 10]), 1)
    assert controls.weight_nat.tolist() == pytest.approx([2 / 14 * 40 / 30 + 4 / 14, 8 / 14 * 40 / 10 + 4 / 14])
    assert (controls.weight_nat * torch.tensor([30, 10])).sum().item() / 40 == pytest.approx(1.0)


def test_wat_counts_beta_through_the_whole_loss() -> None:
    made = ClassStats.zeros(2)
    terms = LossTerms(nat=torch.tensor([1.0, 2.0]), adv=torch.tensor([0.5, 0.25]), beta=6.0)
    made.update(terms, torch.tensor([0, 1]))
    assert made.loss.tolist() == [4.0, 3.5]


def test_wat_refuses_a_rate_that_is_not_positive() -> None:
    with pytest.raises(InputError, match="eta must be positive, got 0"):
        WAT(eta=0)


@pytest.mark.parametrize("policy", TABLE, ids=repr)
@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_permuting_classes_permutes_controls(policy: Policy, num_classes: int) -> None:
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(0))
    plain, permuted = fresh(policy), fresh(policy)
    plain.start(task(num_classes))
    permuted.start(task(num_classes))
    one = drive(plain, num_classes, range(1, 4))
    two = drive(permuted, num_classes, range(1, 4), order)
    for name in ("weight_nat", "weight_adv", "eps_scale", "beta_scale"):
        assert torch.allclose(getattr(one, name)[order], getattr(two, name))


@pytest.mark.parametrize("policy", TABLE, ids=repr)
def test_saved_state_continues_where_it_stopped(policy: Policy) -> None:
    whole, first, second = fresh(policy), fresh(policy), fresh(policy)
    for part in (whole, first, second):
        part.start(task(5))
    expected = drive(whole, 5, range(1, 7))
    drive(first, 5, range(1, 4))
    second.load_state_dict(first.state_dict())
    found = drive(second, 5, range(4, 7))
    assert torch.equal(expected.weight_nat, found.weight_nat)


@pytest.mark.parametrize("policy", TABLE, ids=repr)
def test_a_class_without_examples_does_no_harm(policy: Policy) -> None:
    policy = fresh(policy)
    policy.start(task(3))
    controls = policy.on_epoch_end(stats([1.0, 0.0, 1.0], [10, 0, 10]), stats([1.0, 0.0, 2.0], [5, 0, 5]), 1)
    if controls is not None:
        assert controls.weight_nat.isfinite().all()
        assert (controls.weight_nat * torch.tensor([10, 0, 10])).sum().item() / 20 == pytest.approx(1.0)
        assert controls.weight_nat[2] > controls.weight_nat[0]
