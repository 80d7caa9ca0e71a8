"""Distillation: the attack against that of TRADES, temperatures per class, ABSLD by hand, and a trained student."""

# B batch, K classes

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import classwise as cw
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, LossTerms, Task
from classwise.objectives import RSLAD, Trades
from classwise.policies import ABSLD

K = 3


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, K)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(9, 1, 4, 4, generator=random, dtype=torch.float64), torch.arange(9) % K


def test_a_model_that_is_its_own_teacher_is_attacked_as_by_trades() -> None:
    model, (x, y) = net().eval(), batch()
    controls = replace(ClassControls.uniform(K), eps_scale=torch.tensor([1.0, 0.5, 2.0]))
    attack = replace(Trades().attack, eps=0.1, steps=5)
    found = [
        objective.perturb(model, x, y, controls, generator=torch.Generator().manual_seed(3))
        for objective in (RSLAD(teacher=copy.deepcopy(model).train(), attack=attack), Trades(attack=attack))
    ]
    assert torch.equal(*found)


def test_attack_moves_outputs_away_from_the_teacher() -> None:
    model, teacher, (x, y) = net().eval(), net(1).eval(), batch()
    objective = RSLAD(teacher=teacher, attack=replace(RSLAD().attack, eps=0.2, steps=10))
    x_adv = objective.perturb(model, x, y, ClassControls.uniform(K))
    log_q = teacher(x).log_softmax(1)
    distance = [
        F.kl_div(model(some).log_softmax(1), log_q, log_target=True, reduction="none").sum(1) for some in (x, x_adv)
    ]
    assert bool((distance[1] > distance[0]).all())


def test_each_term_has_the_temperature_of_its_class() -> None:
    model, teacher, (x, y) = net().eval(), net(1).eval(), batch()
    nat, adv = torch.tensor([0.5, 1.0, 4.0]), torch.tensor([3.0, 0.7, 1.0])
    controls = replace(ClassControls.uniform(K), temperature_nat=nat, temperature_adv=adv)
    objective = RSLAD(teacher=teacher, temperature=1.5)
    terms = objective.under(controls).terms(model, x, 1 - x, y)
    for i, label in enumerate(y.tolist()):
        for found, image, scale in ((terms.nat[i] * 6, x[i : i + 1], nat), (terms.adv[i], 1 - x[i : i + 1], adv)):
            q = (teacher(x[i : i + 1]) / (1.5 * scale[label])).softmax(1)
            expected = (q * (q.log() - model(image).log_softmax(1))).sum()
            assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    # No gradient reaches the teacher, and its mode is unchanged.
    teacher.train()
    objective.terms(model, x, 1 - x, y).adv.sum().backward()
    assert all(weight.grad is None for weight in teacher.parameters())
    assert teacher.training
    assert int(teacher[2].num_batches_tracked) == 0


def test_cross_entropies_are_summed_by_class() -> None:
    random = torch.Generator().manual_seed(0)
    logits_nat, logits_adv = torch.randn(2, 9, K, generator=random)
    y, stats = batch()[1], ClassStats.zeros(K)
    for part in (slice(0, 5), slice(5, 9)):
        zero = torch.zeros(len(y[part]))
        terms = LossTerms(nat=zero, adv=zero, beta=1.0, logits_nat=logits_nat[part], logits_adv=logits_adv[part])
        stats += ClassStats.of(terms, y[part], K)
    for label in range(K):
        for found, logits in ((stats.ce_nat, logits_nat), (stats.ce_adv, logits_adv)):
            expected = F.cross_entropy(logits[y == label].double(), y[y == label], reduction="sum")
            assert float(found[label]) == pytest.approx(float(expected))


def test_temperatures_by_hand() -> None:
    """Mean losses 1, 2, 6 around 3: (-2, -1, 3) / 3; then 2, 2, 2, and nobody moves; then 0, 3, 0: (-1, 2, -1) / 2."""
    policy = ABSLD(rate=0.6)
    policy.start(Task(classes=("a", "b", "c")))
    expected = [1.0, 1.0, 1.0]
    for losses, moves in (
        ([1.0, 2.0, 6.0], [0.4, 0.2, -0.6]),
        ([2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
        ([0.0, 3.0, 0.0], [0.3, -0.6, 0.3]),
    ):
        stats = ClassStats.zeros(K)
        stats.n_nat += torch.tensor([10, 20, 30])
        stats.n_adv += stats.n_nat
        stats.ce_nat += torch.tensor(losses) * stats.n_nat
        stats.ce_adv += torch.tensor(losses[::-1]) * stats.n_adv
        controls = policy.on_epoch_end(stats, ClassStats.zeros(K), 1)
        expected = [min(5.0, max(0.5, value + move)) for value, move in zip(expected, moves, strict=True)]
        assert controls.temperature_nat is not None
        assert controls.temperature_nat.tolist() == pytest.approx(expected)
    assert controls.temperature_adv is not None
    assert controls.temperature_adv.tolist() == pytest.approx([0.5 + 0.3, 1.2 - 0.6, 1.4 + 0.3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RSLAD(beta=1.2), "beta must lie between 0 and 1, got 1.2"),
        (lambda: RSLAD(temperature=0), "temperature must be positive, got 0"),
        (lambda: RSLAD(attack=replace(RSLAD().attack, restarts=2)), "needs an untargeted attack without restarts"),
        (lambda: RSLAD().terms(net(), *(batch()[0],) * 2, batch()[1]), "objective 'rslad' needs a teacher"),
        (lambda: ABSLD(rate=-1), "rate must not be negative, got -1"),
        (lambda: ABSLD(low=2), "must satisfy 0 < low <= 1 <= high, got 2 and 5.0"),
    ],
)
def test_invalid_settings_raise_an_error(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_student_learns_from_a_run(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 3, "attack": {"steps": 2}}
    cw.train("digits/trades", out=tmp_path / "teacher", **quick)
    lesson = {**quick, "objective": {"name": "rslad", "teacher": str(tmp_path / "teacher")}, "policy": "absld"}
    run = cw.train("digits/trades", out=tmp_path / "student", **lesson)
    assert run.outcome.history[-1]["loss"] < run.outcome.history[0]["loss"]
    assert run.outcome.history[-1]["validation"]["natural"]["overall"] > 50
    first, *later = (record["controls"] for record in run.outcome.history)
    assert first == {}
    assert all({"temperature_nat", "temperature_adv"} <= controls.keys() for controls in later)


def test_an_invalid_teacher_is_refused_before_training(tmp_path: Path) -> None:
    for teacher, complaint in ((None, "needs a teacher"), (str(tmp_path / "nobody"), "nobody")):
        with pytest.raises(InputError, match=complaint):
            cw.train("digits/trades", out=tmp_path / "run", objective={"name": "rslad", "teacher": teacher})
    with pytest.raises(InputError, match="which this objective does not use"):
        cw.train("digits/trades", out=tmp_path / "run", policy="absld")
    assert not (tmp_path / "run").exists()
