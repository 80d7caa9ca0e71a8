"""Targeted attacks: which classes are targeted, which images are attacked, and invalid targets."""

# B batch, K classes

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import APGD, ATTACKS, CWPGD, FAB, FGSM, PGD, Square, TemperaturePGD, gradient
from classwise.attacks.gradient import GradientAttack
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.types import AttackCall
from each import for_each

EPS = 0.45
AIMED = [PGD(steps=30), PGD(steps=30, loss="margin"), TemperaturePGD(steps=30)]
"""They go on until they reach their target."""
CONTENT = [PGD(steps=30, loss="dlr"), APGD(steps=30), APGD(steps=30, loss="dlr"), CWPGD(steps=30), FAB(steps=20)]
"""Attacks that stop at the first wrong class, which may differ from the target."""


class Linear(nn.Module):
    """Logits in which every pixel belongs to one class."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(4 * num_classes, num_classes)
        self.layer.weight.data = torch.eye(num_classes).repeat_interleave(4, 1)
        self.layer.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def pictures(size: int = 12, num_classes: int = 5) -> tuple[Tensor, Tensor]:
    """Images that the linear model classifies as their label, and from which every class can be reached."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(size) % num_classes
    x = 0.4 + 0.1 * torch.rand(size, 1, num_classes, 4, generator=random)
    x[torch.arange(size), 0, y] += 0.1
    return x, y


def reached(attack: GradientAttack, **settings: object) -> tuple[Tensor, Tensor, Tensor]:
    """Natural logits, labels and final predictions."""
    model, (x, y) = Linear(), pictures()
    aimed = type(attack)(**{**vars(attack), "eps": EPS, **settings})
    with torch.no_grad():
        x_adv = aimed(model, x, y, generator=ExampleNoise(0, torch.arange(len(x))))
        return model(x), y, model(x_adv).argmax(1)


@pytest.mark.parametrize("attack", [*AIMED, FGSM()], ids=repr)
def test_likely_and_unlikely_classes(attack: GradientAttack) -> None:
    clean, y, found = reached(attack, target="least-likely")
    assert torch.equal(found, clean.scatter(1, y[:, None], torch.inf).argmin(1))
    clean, y, found = reached(attack, target="most-likely")
    assert torch.equal(found, clean.scatter(1, y[:, None], -torch.inf).argmax(1))


@pytest.mark.parametrize("attack", AIMED, ids=repr)
def test_a_class_number_targets_all_images_of_other_classes(attack: GradientAttack) -> None:
    _, y, found = reached(attack, target=3)
    assert torch.equal(found, torch.full_like(y, 3))
    model, (x, y) = Linear(), pictures()
    aimed = type(attack)(**{**vars(attack), "eps": EPS, "target": 3})
    x_adv, effort = aimed.run(AttackCall(model, x, y))
    assert torch.equal(x_adv[y == 3], x[y == 3])
    assert (effort.forwards[y == 3] == 0).all()


@pytest.mark.parametrize("attack", AIMED, ids=repr)
def test_given_classes(attack: GradientAttack) -> None:
    model, (x, y) = Linear(), pictures()
    targets = (y + torch.tensor([1, 2, 3, 4]).repeat(3)) % 5
    aimed = type(attack)(**{**vars(attack), "eps": EPS})
    with torch.no_grad():
        assert torch.equal(model(aimed(model, x, y, targets=targets)).argmax(1), targets)


@for_each("attack", [*AIMED, *CONTENT], ids=repr)
@for_each("target", ["most-likely", "least-likely", "random", "all", 3])
def test_every_kind_of_target_breaks_what_can_be_broken(attack: GradientAttack, target: str | int) -> None:
    _, y, found = reached(attack, target=target)
    assert torch.equal(found != y, y != target if isinstance(target, int) else y >= 0)


def test_random_classes_are_uniform_over_the_wrong_ones() -> None:
    model, (x, y) = Linear(), pictures(5)
    x, y = x.repeat(400, 1, 1, 1), y.repeat(400)
    attack = FGSM(eps=EPS, target="random")
    with torch.no_grad():
        found = model(attack(model, x, y, generator=ExampleNoise(0, torch.arange(len(x))))).argmax(1)
    counts = torch.zeros(5, 5).index_put_((y, found), torch.ones(len(y)), accumulate=True)
    assert (counts.diagonal() == 0).all()
    wrong = counts[~torch.eye(5, dtype=torch.bool)]
    # 400 draws over four classes: a count lies within five standard deviations of 100
    assert ((wrong - 100).abs() < 5 * (400 * 0.25 * 0.75) ** 0.5).all()


class Gate(nn.Module):
    """Class 2 is reached by brighter images. Class 3 gains from darker ones but is never reached; class 1 gains from
    nothing.
    """

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1).mean(1)
        return torch.stack([score * 0, score * 0 - 5, score - 0.6, -0.06 - score / 10], 1)


def test_only_the_right_target_breaks_and_all_are_tried_until_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "CAPACITY", {False: 1})  # one after the other
    x, y = torch.full((3, 1, 4, 4), 0.4), torch.zeros(3, dtype=torch.int64)
    model = Gate()
    for attack in CONTENT:
        towards, away = (replace(attack, eps=0.3, target=target) for target in (2, 3))
        with torch.no_grad():
            assert (model(towards(model, x, y)).argmax(1) == 2).all()
            assert (model(away(model, x, y)).argmax(1) == 0).all()
    every = PGD(eps=0.3, steps=4, loss="margin", target="all")
    with torch.no_grad():
        assert (model(every(model, x, y)).argmax(1) == 2).all()
    # likeliest first: class 3 (-0.1), which never succeeds, then class 2 (-0.2), which does
    _, effort = every.run(AttackCall(model, x, y))
    assert effort.backwards.tolist() == [8, 8, 8]
    first = PGD(eps=0.3, steps=4, loss="margin", target="all", num_targets=1)
    with torch.no_grad():
        assert (model(first(model, x, y)).argmax(1) == 0).all()


def test_restarts_attack_survivors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "CAPACITY", {False: 1})  # one after the other
    x, y = torch.full((2, 1, 4, 4), 0.4), torch.zeros(2, dtype=torch.int64)
    attack = PGD(eps=0.3, steps=4, target="all", restarts=3, start="zero")
    _, effort = attack.run(AttackCall(Gate(), x, y, eps_scale=torch.tensor([1.0, 0.1])))
    # class 3 for both, then class 2, which breaks the first; the second is tried at all three, three times
    assert effort.backwards.tolist() == [8, 36]


@for_each(
    ("spec", "message"),
    [
        ("pgd:target=-1", "target must be a class number from 0, got -1"),
        ("pgd:target=nearest", "target = 'nearest'"),
        ("pgd:num_targets=3", "num_targets needs target=all, got target=None"),
        ("apgd:target=all,num_targets=0", "num_targets = '0': must be at least 1"),
        ("fab:restarts=0", "restarts = '0': must be at least 1"),
        ("pgd:steps=0", "steps = '0': must be at least 1"),
        ("apgd:steps=0", "steps = '0': must be at least 1"),
        ("pgd:step_size=-0.1", "step_size = '-0.1': must be greater than 0"),
        ("fgsm:step_size=-0.1", "step_size = '-0.1': must be greater than 0"),
        ("temperature-pgd:step_size=-1/255", "step_size = '-1/255': must be greater than 0"),
        ("temperature-pgd:inv_t=2+2", "inv_t must be one or more distinct numbers"),
        ("cw-pgd:steps=0", "steps = '0': must be at least 1"),
        ("square:queries=0", "queries = '0': must be at least 1"),
        ("autoattack:attacks=apgd-ce+pgd", "pgd"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@for_each(
    ("attack", "targets", "message"),
    [
        (PGD(eps=EPS), [0, 1, 2], "a target must differ from the true label, but 3 of 3 images have it as target"),
        (APGD(eps=EPS), [1, 1, 0], "a target must differ from the true label, but 1 of 3 images have it as target"),
        (FAB(eps=EPS), [1, 5, 0], "target 5 is not a class: expected 0 to 4"),
        (PGD(eps=EPS), [1, -1, 0], "target -1 is not a class"),
        (PGD(eps=EPS), [1, 0], "expected one target per image, got (2,) for 3 images"),
        (
            PGD(eps=EPS, loss="kl"),
            [1, 2, 0],
            "does not support targets: use a gradient attack with a loss other than 'kl'",
        ),
        (PGD(eps=EPS, target=7), None, "target 7 is not a class"),
        (
            PGD(eps=EPS, target="all", num_targets=5),
            None,
            "num_targets must be at most 4, the number of wrong classes, got 5",
        ),
        (Square(eps=EPS), [1, 2, 0], "does not support targets"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_invalid_targets_raise_a_one_line_error(
    attack: GradientAttack, targets: list[int] | None, message: str
) -> None:
    x, y = pictures(3)
    with pytest.raises(InputError) as caught:
        attack(Linear(), x, y, targets=None if targets is None else torch.tensor(targets))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
