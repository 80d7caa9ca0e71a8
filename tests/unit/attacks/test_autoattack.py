"""AutoAttack: the attacks of every version, custom lists, and stages that attack survivors of previous stages."""

# B batch, K classes

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import APGD, ATTACKS, FAB, AutoAttack, Square
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall

BALL: dict[str, Any] = {"eps": "8/255", "norm": "L2"}


class Linear(nn.Module):
    """Logits W (x - 1/2): the worst case in a ball has a closed form."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.weight: Tensor
        self.register_buffer("weight", torch.randn(num_classes, 36, generator=random))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.weight.T


def images(size: int) -> Tensor:
    return torch.rand(size, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def breakable(model: Linear, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """(B,) whether some class can overtake the label within the Linf ball and the box."""
    ball = Threat.parse(eps).ball(x)
    gaps = model.weight[None] - model.weight[y][:, None]
    low, high = ((bound - x).flatten(1)[:, None] for bound in (ball.low, ball.high))
    logits = model(x)
    best = logits - logits.gather(1, y[:, None]) + torch.maximum(gaps * low, gaps * high).sum(2)
    return best.scatter(1, y[:, None], -torch.inf).amax(1) > 0


@pytest.mark.parametrize(("num_classes", "targets"), [(2, 1), (3, 2), (4, 3), (10, 9), (200, 9)])
def test_versions_are_those_of_the_paper(num_classes: int, targets: int) -> None:
    aimed: dict[str, Any] = {"target": "all", "num_targets": targets, **BALL}
    standard = AutoAttack(**BALL).stages(num_classes)
    assert list(standard.items()) == [
        ("apgd-ce", APGD(steps=100, loss="ce", restarts=1, **BALL)),
        ("apgd-t", APGD(steps=100, loss="dlr", restarts=1, **aimed)),
        ("fab-t", FAB(steps=100, restarts=1, **aimed)),
        ("square", Square(queries=5000, **BALL)),
    ]
    assert list(AutoAttack(version="plus", **BALL).stages(num_classes).items()) == [
        ("apgd-ce", APGD(steps=100, loss="ce", restarts=5, **BALL)),
        ("apgd-dlr", APGD(steps=100, loss="dlr", restarts=5, **BALL)),
        ("fab", FAB(steps=100, restarts=5, **BALL)),
        ("square", Square(queries=5000, **BALL)),
        ("apgd-t", APGD(steps=100, loss="dlr", restarts=1, **aimed)),
        ("fab-t", FAB(steps=100, restarts=1, **aimed)),
    ]
    assert list(AutoAttack(version="rand", **BALL).stages(num_classes).items()) == [
        ("apgd-ce", APGD(steps=100, loss="ce", eot=20, **BALL)),
        ("apgd-dlr", APGD(steps=100, loss="dlr", eot=20, **BALL)),
    ]


def test_custom_lists_keep_their_order_and_the_settings_of_the_version() -> None:
    attack = build("attack", ATTACKS, "autoattack:attacks=square+apgd-dlr,version=plus,steps=7,queries=30")
    assert attack.stages(10) == {"square": Square(queries=30), "apgd-dlr": APGD(loss="dlr", steps=7, restarts=5)}
    assert list(attack.stages(10)) == ["square", "apgd-dlr"]
    alone = build("attack", ATTACKS, "autoattack:attacks=fab")
    assert alone == AutoAttack(attacks=("fab",))
    assert alone.stages(10) == {"fab": FAB(steps=100)}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("autoattack:attacks=apgd-ce+sqare", "unknown attack in AutoAttack 'sqare': did you mean 'square'?"),
        ("autoattack:attacks=pgd", "(known: apgd-ce, apgd-dlr, apgd-t, fab, fab-t, square)"),
        ("autoattack:attacks=fab+fab", "attacks must be one or more distinct names, got fab+fab"),
        ("autoattack:attacks=", "unknown attack in AutoAttack ''"),
        ("autoattack:version=full", "version = 'full': must be 'standard', 'plus' or 'rand'"),
        ("autoattack:steps=0", "steps = '0': must be at least 1"),
        ("autoattack:queries=0", "queries = '0': must be at least 1"),
        ("autoattack:norm=L1", "norm = 'L1'"),
    ],
)
def test_invalid_specs_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_list_is_an_error() -> None:
    with pytest.raises(InputError, match="attacks must be one or more distinct names, got none"):
        AutoAttack(attacks=())


@pytest.mark.parametrize("num_classes", [2, 3, 4, 10])
def test_breaks_exactly_what_can_be_broken_on_a_linear_model(num_classes: int) -> None:
    model, x = Linear(num_classes), images(60)
    y = model(x).argmax(1)
    for eps in (0.01, 0.02, 0.04, 0.06, 0.08):
        possible = breakable(model, x, y, eps)
        if possible.sum() > 15:
            break
    assert 15 < possible.sum() < 45
    x_adv = AutoAttack(eps=eps, steps=20, queries=20)(model, x, y, generator=ExampleNoise(0, torch.arange(60)))
    assert Threat.parse(eps).ball(x).contains(x_adv).all()
    assert torch.equal(model(x_adv).argmax(1) != y, possible)


@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
@pytest.mark.parametrize("num_classes", [3, 12])
def test_stages_attack_survivors_of_previous_stages(version: Any, num_classes: int) -> None:
    """Survivors, images and passes equal those of running every stage separately on the remaining examples."""
    model, x = Linear(num_classes), images(30)
    y = model(x).argmax(1)
    y[:5] = (y[:5] + 1) % num_classes
    attack = AutoAttack(eps=0.03, version=version, steps=6, queries=20)
    noise = ExampleNoise(0, torch.arange(30))
    x_adv, effort = attack.run(AttackCall(model, x, y, generator=noise))

    expected, passes = x.clone(), torch.ones(30, dtype=torch.int64)
    rows = torch.arange(5, 30)
    noise = ExampleNoise(0, torch.arange(30)).take(rows)
    for stage in attack.stages(num_classes).values():
        expected[rows], spent = stage.run(AttackCall(model, x[rows], y[rows], generator=noise))
        passes[rows] += spent.forwards + 1  # and one to determine the survivors
        alive = model(expected[rows]).argmax(1) == y[rows]
        rows, noise = rows[alive], noise.take(alive)
        if not len(rows):
            break
    assert torch.equal(x_adv[:5], x[:5])
    assert (effort.forwards[:5] == 1).all()
    assert torch.allclose(x_adv, expected, atol=1e-6, rtol=0)
    assert torch.equal(effort.forwards, passes)
    assert 0 < (model(x_adv).argmax(1) == y).sum() < 25
