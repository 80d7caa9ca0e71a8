"""Every objective: losses and gradients against float64 references, counted batch-norm updates, no synchronization
with the host, and equal results of the compiled step's model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import classwise as cw
from classwise.accelerate import make_optimized_copy
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, LossTerms, Objective, reduce
from classwise.models import HypersphereHead, with_hypersphere
from classwise.objectives import (
    BAT,
    OBJECTIVES,
    RSLAD,
    Free,
    HypersphereEmbedding,
    Madry,
    Mart,
    Similarity,
    Standard,
    Trades,
)
from classwise.training import compiled
from classwise.training.plan import make_plan
from each import for_each

K, B = 3, 8
Logits = dict[str, Tensor]
"""(B, K) of the clean images, the attacked ones, and for two points of an attack the one before."""


def softmax(logits: Tensor) -> Tensor:
    return torch.exp(logits) / torch.exp(logits).sum()


def ce(logits: Tensor, label: int, smoothing: float = 0.0) -> Tensor:
    p = softmax(logits)
    wanted = [smoothing / K + (1 - smoothing) * (k == label) for k in range(K)]
    return -sum(wanted[k] * torch.log(p[k]) for k in range(K))


def kl(p: Tensor, q: Tensor) -> Tensor:
    return sum(p[k] * (torch.log(p[k]) - torch.log(q[k])) for k in range(K))


def less_at(logits: Tensor, label: int, amount: float) -> Tensor:
    return torch.stack([logits[k] - amount * (k == label) for k in range(K)])


def uniform_kl(logits: Tensor) -> Tensor:
    return kl(softmax(logits), torch.full((K,), 1 / K, dtype=logits.dtype))


def mean_cosine(logits: Tensor, y: list[int]) -> Tensor:
    """Over ordered pairs of the classes present."""
    means = {k: torch.stack([z for z, label in zip(logits, y, strict=True) if label == k]).mean(0) for k in set(y)}
    pairs = [(means[i], means[j]) for i in means for j in means if i != j]
    return torch.stack([(a @ b) / (a.norm() * b.norm()) for a, b in pairs]).mean()


def standard(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return ce(z["nat"][i], y[i]), 0 * z["nat"][i, 0]


def smoothed(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return ce(z["nat"][i], y[i], 0.3), 0 * z["nat"][i, 0]


def madry(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return 0 * z["nat"][i, 0], ce(z["adv"][i], y[i])


def trades(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return ce(z["nat"][i], y[i]), kl(softmax(z["nat"][i]), softmax(z["adv"][i]))


def mart(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    p, q = softmax(z["nat"][i]), softmax(z["adv"][i])
    rival = max((q[k] for k in range(K) if k != y[i]), key=Tensor.item)
    return ce(z["adv"][i], y[i]) - torch.log(1.0001 - rival + 1e-12), kl(p, q) * (1.0000001 - p[y[i]])


def he_madry(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return 0 * z["nat"][i, 0], ce(less_at(z["adv"][i], y[i], 5 * 0.3), y[i])


def he_trades(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    margined = less_at(z["nat"][i], y[i], 15 * 0.2)
    return ce(margined, y[i], 0.1), kl(softmax(z["nat"][i]), softmax(z["adv"][i]))


def similar_standard(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return ce(z["nat"][i], y[i]) + 0.7 * mean_cosine(z["nat"], y), 0 * z["nat"][i, 0]


def similar_madry(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    return 0 * z["nat"][i, 0], ce(z["adv"][i], y[i]) + 0.7 * mean_cosine(z["adv"], y)


def similar_trades(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    nat, adv = trades(z, y, i)
    return nat + 0.7 * mean_cosine(z["nat"], y), adv


def bat(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    nat = ce(z["before"][i], y[i]) + uniform_kl(z["before"][i]) + uniform_kl(z["adv"][i])
    return nat, kl(softmax(z["nat"][i]), softmax(z["adv"][i]))


class Pixels(nn.Module):
    """A teacher without weights, whose logits are three times the first pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x.flatten(1).repeat(1, 7)[:, : self.num_classes]


def rslad(z: Logits, y: list[int], i: int) -> tuple[Tensor, Tensor]:
    q = softmax(Pixels(K)(batch()[0])[i] / 2)
    return 0.25 * kl(q, softmax(z["nat"][i])), kl(q, softmax(z["adv"][i]))


TABLE: list[tuple[Objective, int, float, Callable[[Logits, list[int], int], tuple[Tensor, Tensor]]]] = [
    # objective, training-mode passes that update batch norm, beta, natural and adversarial term of an example
    (Standard(), 1, 0.0, standard),
    (Standard(smoothing=0.3), 1, 0.0, smoothed),
    (Madry(), 1, 1.0, madry),
    (Trades(beta=2.5), 2, 2.5, trades),
    (Free(), 4, 1.0, madry),
    (Mart(beta=4.0), 2, 4.0, mart),
    (HypersphereEmbedding(scale=5, margin=0.3), 1, 1.0, he_madry),
    (HypersphereEmbedding(base="trades", beta=2.5, smoothing=0.1), 2, 2.5, he_trades),
    (HypersphereEmbedding(schedule="lis"), 1, 1.0, madry),
    (HypersphereEmbedding(schedule="cmp", base="trades"), 2, 6.0, trades),
    (Similarity(base="standard", strength=0.7), 1, 0.0, similar_standard),
    (Similarity(base="madry", strength=0.7), 1, 1.0, similar_madry),
    (Similarity(base="trades", strength=0.7, beta=2.5), 2, 2.5, similar_trades),
    (BAT(beta=2.5), 3, 2.5, bat),
    (RSLAD(teacher=Pixels(K), beta=0.75, temperature=2), 2, 0.75, rslad),
]
NAMES = [f"{type(objective).__name__}-{reference.__name__}" for objective, _, _, reference in TABLE]
EVERY = pytest.mark.parametrize(("objective", "passes", "beta", "reference"), TABLE, ids=NAMES)


def net(objective: Objective) -> nn.Module:
    torch.manual_seed(0)
    # No bias before batch norm: its gradient is zero up to rounding, which cannot be compared.
    conv = nn.Conv2d(1, 4, 3, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, K)).double()
    if isinstance(objective, HypersphereEmbedding):
        with_hypersphere(model)
    objective.on_epoch(model, 7)
    return model


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(B, 1, 4, 4, generator=random, dtype=torch.float64), torch.randint(K, (B,), generator=random)


def bounded(objective: Objective) -> Objective:
    return objective if objective.attack is None else replace(objective, attack=replace(objective.attack, eps=0.1))


def test_table_covers_the_registry() -> None:
    assert {type(objective) for objective, *_ in TABLE} == set(OBJECTIVES.values())


@EVERY
def test_batch_norm_is_updated_by_the_stated_passes_only(
    objective: Objective, passes: int, beta: float, reference: object
) -> None:
    model = net(objective).train()
    x, y = batch()
    bounded(objective)(model, x, y, ClassControls.uniform(K), generator=torch.Generator().manual_seed(0))
    assert model[1].num_batches_tracked == passes
    assert model.training


@EVERY
def test_loss_and_gradient_equal_the_reference(
    objective: Objective,
    passes: int,
    beta: float,
    reference: Callable[[Logits, list[int], int], tuple[Tensor, Tensor]],
) -> None:
    x, y = batch()
    objective = bounded(objective)
    controls = ClassControls(
        weight_nat=torch.tensor([0.5, 1.0, 2.0]),
        weight_adv=torch.tensor([1.5, 0.2, 1.0]),
        eps_scale=torch.tensor([1.0, 0.5, 2.0]),
        beta_scale=torch.tensor([1.0, 3.0, 0.1]),
    )
    model = net(objective).eval()
    x_adv = objective.perturb(model, x, y, controls, generator=torch.Generator().manual_seed(5))
    terms = objective.under(controls).terms(model, x, x_adv, y)
    reduce(terms, y, controls).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]

    other = net(objective).eval()
    random = torch.Generator().manual_seed(5)
    attacked: list[Tensor] = [x]
    radius = 0.1 * controls.eps_scale[y]
    if type(objective).perturb is not Objective.perturb:  # tested separately
        attacked = list(objective.perturb(other, x, y, controls, generator=random).detach().split(B))
    elif objective.attack is not None:
        attacked = [objective.attack(other, x, y, eps_scale=controls.eps_scale[y], generator=random)]
        assert ((attacked[0] - x).abs().flatten(1).amax(1) > 0.5 * radius).all()
    assert all(((x_adv - x).abs().flatten(1).amax(1) <= radius + 1e-9).all() for x_adv in attacked)
    logits = {"nat": other(x), "adv": other(attacked[-1]), "before": other(attacked[0])}
    rows = [reference(logits, y.tolist(), i) for i in range(B)]
    nat, adv = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    expected = sum(
        controls.weight_nat[k] * nat[i] + beta * controls.beta_scale[k] * controls.weight_adv[k] * adv[i]
        for i, k in enumerate(y.tolist())
    )
    (expected / B).backward()
    assert torch.allclose(terms.nat, nat, atol=1e-12)
    assert torch.allclose(terms.adv, adv, atol=1e-12)
    assert ("weight_nat" in objective.used_controls) == bool(terms.nat.any())
    assert ({"weight_adv", "beta_scale"} <= objective.used_controls) == bool(beta and terms.adv.any())
    for mine, theirs in zip(found, other.parameters(), strict=True):
        assert torch.allclose(mine, theirs.grad, atol=1e-12)


@EVERY
def test_objectives_do_not_read_tensor_values(
    objective: Objective, passes: int, beta: float, reference: object
) -> None:
    """Fake tensors have shapes but no values: reading a value raises an error, as in a graph capture."""
    objective = bounded(objective)
    with FakeTensorMode():
        head = HypersphereHead if isinstance(objective, HypersphereEmbedding) else nn.Linear
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), head(16, K)).train()
        objective.on_epoch(model, 1)
        x, y = torch.rand(B, 1, 4, 4), torch.zeros(B, dtype=torch.int64)
        terms = objective(model, x, y, ClassControls.uniform(K))
        reduce(terms, y, ClassControls.uniform(K)).backward()
        with pytest.raises(DataDependentOutputException):
            bool(terms.nat.sum() > 0)
    assert model[4].weight.grad.shape == (K, 16)


@EVERY
def test_step_model_equals_the_model(
    objective: Objective, passes: int, beta: float, reference: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate and paired passes, with an optimized copy, without the compiler and the graph."""
    monkeypatch.setattr(compiled, "compiled", lambda function: function)
    objective = bounded(objective)
    x, y = batch()
    x, controls = x.float(), ClassControls.uniform(K)
    model = net(objective).float().train()
    same = copy.deepcopy(model)
    optimized = make_optimized_copy(same, x, lowered=False)
    assert optimized is not None
    assert optimized.how == "folded"
    optimized.slack = 0.0  # so that the last correct point is the same for both
    stand = compiled.StepModel(same, optimized, "fp32", torch.device("cpu"))
    losses = []
    for asked in (model, stand):
        terms = objective(asked, x, y, controls, generator=torch.Generator().manual_seed(0))
        losses.append(reduce(terms, y, controls))
        losses[-1].backward()
    assert torch.allclose(*losses, rtol=1e-4)
    assert same[1].num_batches_tracked == passes
    for mine, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3 * float(mine.grad.abs().amax()) + 1e-7)


@for_each("num_classes", [2, 10, 100])
@EVERY
def test_any_number_of_classes_and_one_class_alone(
    objective: Objective, passes: int, beta: float, reference: object, num_classes: int
) -> None:
    """A batch of one class only, so that all others are absent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, num_classes))
    if isinstance(objective, HypersphereEmbedding):
        with_hypersphere(model)
    if isinstance(objective, RSLAD):
        objective = replace(objective, teacher=Pixels(num_classes))
    objective.on_epoch(model, 1)
    x, y = batch()
    y = torch.full_like(y, num_classes - 1)
    terms = bounded(objective)(model, x.float(), y, ClassControls.uniform(num_classes))
    reduce(terms, y, ClassControls.uniform(num_classes)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert terms.nat.shape == terms.adv.shape == (B,)


def test_reduce_is_the_plain_mean_under_uniform_controls() -> None:
    terms = LossTerms(nat=torch.tensor([1.0, 2.0]), adv=torch.tensor([3.0, 5.0]), beta=2.0)
    assert reduce(terms, torch.tensor([0, 1]), ClassControls.uniform(2)).item() == pytest.approx((7 + 12) / 2)


@pytest.mark.parametrize(
    ("objective", "beta"),
    [
        ("mart", 5.0),
        ("bat:beta=3", 3.0),
        ("similarity:base=standard", 1.0),
        ("similarity:base=trades,beta=2,smoothing=0.1", 2.0),
        ("madry:smoothing=0.1", 1.0),
    ],
)
def test_recipes_train_with_every_objective(objective: str, beta: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"objective": objective, "epochs": 2, "attack": {"steps": 2}, "policy": "wat"}
    plan = make_plan(load_recipe("digits/madry", settings), torch.device("cpu"))
    assert plan.task.beta == beta
    run = cw.train("digits/madry", out=tmp_path, device="cpu", **settings)
    first, last = run.outcome.history
    assert last["loss"] < first["loss"]
    assert last["validation"]["natural"]["overall"] > 30  # three times chance


@pytest.mark.parametrize("kind", [Standard, Madry, Trades])
def test_smoothing_equals_that_of_torch(kind: type[Standard | Madry | Trades]) -> None:
    objective = kind(smoothing=0.25)
    x, y = batch()
    model = net(objective).eval()
    terms = bounded(objective)(model, x, y, ClassControls.uniform(K))
    logits, found = (terms.logits_adv, terms.adv) if isinstance(objective, Madry) else (terms.logits_nat, terms.nat)
    expected = nn.functional.cross_entropy(logits, y, label_smoothing=0.25)
    assert found.mean().item() == pytest.approx(expected.item())
    assert found.mean().item() != pytest.approx(nn.functional.cross_entropy(logits, y).item())


@for_each(
    ("make", "message"),
    [
        (lambda: Standard(smoothing=1.0), "smoothing must be at least 0 and below 1, got 1.0"),
        (lambda: Trades(smoothing=-0.1), "smoothing must be at least 0 and below 1, got -0.1"),
        (lambda: Trades(beta=-1), "beta must not be negative, got -1"),
        (lambda: Mart(beta=-1), "beta must not be negative, got -1"),
        (lambda: BAT(beta=-1), "beta must not be negative, got -1"),
        (lambda: BAT(tau=-1), "tau must not be negative, got -1"),
        (lambda: BAT(attack=replace(BAT().attack, restarts=2)), "needs an untargeted attack without restarts"),
        (lambda: Similarity(strength=-1), "strength must not be negative, got -1"),
        (lambda: Similarity(base="mart"), "unknown base of an objective 'mart'"),
        (lambda: Similarity(base="madry", beta=3), "base 'madry' has no beta, got 3"),
        (lambda: HypersphereEmbedding(base="standard"), "unknown base of an objective 'standard'"),
        (lambda: HypersphereEmbedding(scale=0), "scale must be positive"),
        (lambda: HypersphereEmbedding(schedule="cmp", scale=9), "unset with cmp, got 9 with cmp"),
        (lambda: HypersphereEmbedding(margin=-0.1), "margin must not be negative"),
        (lambda: HypersphereEmbedding(schedule="lis", margin=0.2), "0 unless schedule=constant, got 0.2 with lis"),
        (lambda: HypersphereEmbedding(schedule="lis", epochs=0), "epochs must be at least 1, got 0"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(make: Callable[[], Objective], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_mart_by_hand() -> None:
    """Logits given outright, K = 3, label 0. Clean (ln 2, 0, 0): p = (1/2, 1/4, 1/4). Attacked (0, ln 2, 0):
    q = (1/4, 1/2, 1/4). BCE = -ln(1/4) - ln(1.0001 - 1/2); KL = 1/2 ln 2 + 1/4 ln(1/2) = 1/4 ln 2; weight 1/2.
    """
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, math.log(2), 0.0]], dtype=torch.float64)
    terms = Mart().terms(nn.Identity(), logits[:1], logits[1:], torch.tensor([0]))
    assert terms.nat.item() == pytest.approx(math.log(4) - math.log(0.5001))
    assert terms.adv.item() == pytest.approx(math.log(2) / 4 * 0.5000001)
    assert terms.beta == 5.0


def test_outside_training_free_updates_the_images_only() -> None:
    """Loss after three steps of gradient descent against the label, by hand, from the same start."""
    objective = bounded(Free(replays=4))
    model, (x, y) = net(objective).eval(), batch()
    even, eps = ClassControls.uniform(K), 0.1
    x_adv = objective.perturb(model, x, y, even, generator=torch.Generator().manual_seed(0)).detach()
    start = torch.nn.functional.cross_entropy(model(x_adv), y).detach()
    for _ in range(3):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x_adv), y), x_adv)
        x_adv = (x_adv.detach() + eps * gradient.sign()).clamp(x - eps, x + eps).clamp(0, 1)
    expected = torch.nn.functional.cross_entropy(model(x_adv), y, reduction="none").detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        terms = objective(model, x, y, even, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(terms.adv, expected)
    assert float(expected.mean()) > float(start)
    assert not terms.adv.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
