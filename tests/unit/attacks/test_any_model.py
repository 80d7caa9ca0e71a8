"""Every registered attack on models of any number of classes, output format, dtype and device, for any batch size."""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from test_attacks import TABLE, Net, batch
from torch import Tensor, nn

from classwise.attacks import BallAttack
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from each import for_each

EPS = 0.1


def bounded(attack: BallAttack) -> BallAttack:
    return attack.within(Threat.parse(EPS, attack.norms[0]))


def known(model: nn.Module, x: Tensor) -> Tensor:
    """The model's predictions as labels, so that every example can be attacked."""
    with torch.no_grad():
        return model.eval()(x).argmax(1)


@for_each("attack", TABLE, ids=repr)
@for_each(("num_classes", "size", "channels"), [(2, 1, 1), (3, 3, 3), (4, 5, 1), (10, 7, 3), (200, 3, 3)])
def test_any_number_of_classes_and_examples(attack: BallAttack, num_classes: int, size: int, channels: int) -> None:
    torch.manual_seed(num_classes)
    model = Net(channels, num_classes)
    x, _ = batch(size, channels, 6, num_classes, 0)
    y = known(model, x)
    x_adv, effort = bounded(attack).run(AttackCall(model, x, y, generator=ExampleNoise(0, torch.arange(size))))
    assert Threat.parse(EPS, attack.norms[0]).ball(x).contains(x_adv).all()
    assert (effort.forwards >= 1).all()
    assert (effort.backwards == 0).all() if attack.black_box else (effort.backwards >= 1).all()


@dataclass
class Output:
    logits: Tensor


@for_each("attack", TABLE, ids=repr)
@for_each("wrap", [lambda z: (z, None), Output, lambda z: {"logits": z}], ids=["tuple", "object", "dict"])
def test_any_output(attack: BallAttack, wrap: type) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> object:
            return wrap(self.inner(x))

    torch.manual_seed(0)
    model = Net(1, 4)
    x, _ = batch(5, 1, 5, 4, 0)
    y = known(model, x)
    plain, wrapped = (
        bounded(attack)(one, x, y, generator=ExampleNoise(0, torch.arange(5))) for one in (model, Wrapped(model))
    )
    assert torch.equal(plain, wrapped)
    assert not torch.equal(plain, x)


@for_each("attack", TABLE, ids=repr)
def test_a_double_precision_model_takes_single_precision_images(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(3, 5).double()
    x, _ = batch(5, 3, 6, 5, 0)
    y = known(model, x.double())
    x_adv = bounded(attack)(model, x, y, generator=ExampleNoise(0, torch.arange(5)))
    assert x_adv.dtype == torch.float32
    assert Threat.parse(EPS, attack.norms[0]).ball(x).contains(x_adv).all()
    assert not torch.equal(x_adv, x)


@pytest.mark.parametrize("attack", TABLE, ids=repr)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_model_on_another_device_than_the_images(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(3, 5).cuda()
    x, _ = batch(5, 3, 6, 5, 0)
    y = known(model, x.cuda()).cpu()
    x_adv, effort = bounded(attack).run(AttackCall(model, x, y, generator=ExampleNoise(0, torch.arange(5))))
    assert x_adv.device == x.device
    assert Threat.parse(EPS, attack.norms[0]).ball(x).contains(x_adv).all()
    assert not torch.equal(x_adv, x)
    assert (effort.forwards.cpu() >= 1).all()


@for_each("attack", TABLE, ids=repr)
def test_a_bound_attack_takes_images_and_labels(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(1, 3)
    x, _ = batch(4, 1, 5, 3, 0)
    y = known(model, x)
    attack = bounded(attack)
    found = attack.bind(model)(x, y, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, attack(model, x, y, generator=torch.Generator().manual_seed(0)))


@for_each("attack", TABLE, ids=repr)
def test_an_empty_batch_takes_no_passes(attack: BallAttack) -> None:
    x_adv, effort = bounded(attack).run(
        AttackCall(Net(1, 3), torch.empty(0, 1, 4, 4), torch.empty(0, dtype=torch.int64))
    )
    assert x_adv.shape == (0, 1, 4, 4)
    assert effort.forwards.shape == (0,)


@for_each("attack", TABLE, ids=repr)
def test_an_example_of_radius_zero_is_unchanged(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(1, 3)
    x, _ = batch(4, 1, 5, 3, 0)
    scale = torch.tensor([1.0, 0.0, 2.0, 0.0])
    x_adv = bounded(attack)(model, x, known(model, x), eps_scale=scale)
    assert torch.equal(x_adv[1], x[1])
    assert torch.equal(x_adv[3], x[3])
    assert not torch.equal(x_adv[0], x[0])


class Counted(nn.Module):
    """Counts the images that pass through it, and the gradients that pass back."""

    def __init__(self, inner: nn.Module, seen: SimpleNamespace) -> None:
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.forwards += len(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: setattr(self.seen, "backwards", self.seen.backwards + len(gradient)))
        return self.inner(x)


@for_each("attack", TABLE, ids=repr)
def test_reported_passes_equal_those_the_model_counts(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(3, 5)
    x, _ = batch(6, 3, 6, 5, 0)
    y = known(model, x)
    seen = SimpleNamespace(forwards=0, backwards=0)
    _, effort = bounded(attack).run(AttackCall(Counted(model, seen), x, y))
    assert int(effort.forwards.sum()) == seen.forwards
    assert int(effort.backwards.sum()) == seen.backwards
