"""Functions as attacks: the arguments they receive, the passes counted, and that the model is restored.

The other libraries' objects are in tests/parity.
"""

# B batch, K classes

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import FGSM, PGD
from classwise.attacks.adapters import ForeignAttack, as_attack
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from each import for_each

THREAT = Threat.parse("8/255")
EPS = THREAT.eps


class Net(nn.Module):
    """A model with batch norm and dropout, whose state an attack could change. Its output may be a Hugging Face
    output.
    """

    def __init__(self, wordy: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)
        self.wordy = wordy

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.drop(self.bn(self.conv(x)).relu().mean((2, 3))))
        return SimpleNamespace(logits=logits) if self.wordy else logits


class Tally(torch.autograd.Function):
    """The identity; counts gradients per example."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, who: Tensor, counts: Tensor) -> Tensor:
        ctx.who, ctx.counts = who, counts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.counts.index_add_(0, ctx.who, torch.ones_like(ctx.who))
        return gradient, None, None


class Witness(nn.Module):
    """Identifies every image by its first pixel, 0.1 apart, and counts passes per example."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.forwards, self.backwards = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        who = (10 * x.detach()[:, 0, 0, 0]).round().long() - 1
        self.forwards.index_add_(0, who, torch.ones_like(who))
        return self.net(Tally.apply(x, who, self.backwards))


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 3, 5, 4, generator=generator)
    x[:, 0, 0, 0] = 0.1 * torch.arange(1, size + 1)
    return x, torch.randint(5, (size,), generator=generator)


def noise(size: int = 8, seed: int = 0) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(100, 100 + size))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def fgsm(model: nn.Module, x: Tensor, y: Tensor, eps: float = 0.3) -> Tensor:
    x = x.clone().requires_grad_()
    nn.functional.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return (x + eps * x.grad.sign()).clamp(0, 1)


def jitter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (x + 0.03 * torch.randn_like(x) + 0.03 * random.random() + 0.03 * float(np.random.rand())).clamp(0, 1)


@dataclass
class Shift:
    """A callable object that states its threat."""

    eps: float
    norm: str = "Linf"
    calls: int = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return x + self.eps

    def method(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x


class Attacker(nn.Module):
    """An attack written as a module."""

    def forward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return fgsm(model, x, y, EPS)


def test_attacks_of_this_package_are_returned_unchanged() -> None:
    ours = PGD(steps=3)
    assert as_attack(ours) is ours
    theirs = as_attack(fgsm)
    assert isinstance(theirs, ForeignAttack)
    assert as_attack(theirs) is theirs
    assert theirs.variants() == theirs.stages(10) == {}


@pytest.mark.parametrize("size", [1, 8])
def test_a_function_receives_the_radius_of_the_evaluation(model: Net, size: int) -> None:
    x, y = batch(size)
    found = as_attack(fgsm).within(THREAT)(model, x, y, generator=noise(size))
    assert torch.equal(found, fgsm(model, x, y, EPS))
    assert torch.allclose(found, FGSM(eps=EPS)(model, x, y), atol=1e-6)
    assert not found.requires_grad
    with pytest.raises(InputError, match="fgsm has no radius"):
        as_attack(fgsm)(model, x, y)


def test_modules_methods_partials_and_bound_attacks_are_functions(model: Net) -> None:
    x, y = batch()
    expected = fgsm(model, x, y, EPS)
    for thing in (Attacker(), partial(fgsm, eps=EPS), FGSM(eps=EPS).__call__, lambda m, a, b: fgsm(m, a, b, EPS)):
        assert torch.allclose(as_attack(thing).within(THREAT)(model, x, y), expected, atol=1e-6)
    assert torch.equal(as_attack(Shift(0.1).method)(model, x, y), x)


def test_a_generator_is_a_torch_generator(model: Net) -> None:
    x, y = batch()

    def drawn(model: nn.Module, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(x.shape, generator=generator)

    attack = as_attack(drawn)
    assert torch.equal(attack(model, x, y, generator=noise()), attack(model, x, y, generator=noise()))
    mine = torch.Generator().manual_seed(3)
    first, second = attack(model, x, y, generator=mine), attack(model, x, y, generator=mine)
    assert not torch.equal(first, second)
    assert torch.equal(attack(model, x, y, generator=torch.Generator().manual_seed(3)), first)


def test_randomness_is_a_function_of_the_stream_alone(model: Net) -> None:
    x, y = batch()
    attack = as_attack(jitter)
    first = attack(model, x, y, generator=noise())
    torch.rand(3), random.random(), np.random.rand(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    again = attack(model, x, y, generator=noise())
    assert torch.equal(first, again)
    assert not torch.equal(first, attack(model, x, y, generator=noise(seed=1)))
    assert not torch.equal(first, attack(model, x, y, generator=ExampleNoise(0, torch.arange(8))))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))


def test_without_a_generator_the_global_states_are_used_as_by_hand(model: Net) -> None:
    x, y = batch()
    found = []
    for call in (as_attack(jitter), jitter):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        found.append((call(model, x, y), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("offset", [5.0, -1.0, float("nan"), 2 * EPS])
def test_results_are_not_projected(model: Net, offset: float) -> None:
    x, y = batch()
    found = as_attack(lambda model, x, y: x + offset).within(THREAT)(model, x, y)
    assert torch.equal(found.nan_to_num(-7), (x + offset).nan_to_num(-7))
    assert not THREAT.ball(x).contains(found).any()


@pytest.mark.parametrize(
    "convert", [Tensor.numpy, Tensor.double, lambda x: x.clone().requires_grad_() * 1], ids=["numpy", "double", "graph"]
)
def test_results_are_converted_to_the_type_and_device_of_the_images(
    model: Net, convert: Callable[[Tensor], Any]
) -> None:
    x, y = batch()
    found = as_attack(lambda model, x, y: convert(x / 2))(model, x, y)
    assert torch.equal(found, x / 2)
    assert (found.dtype, found.device, found.requires_grad) == (x.dtype, x.device, False)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:3], r"wrong returned \(3, 3, 5, 4\); expected images of shape \(8, 3, 5, 4\)"),
        (lambda x: (x, x), "wrong returned tuple"),
        (lambda x: None, "wrong returned NoneType"),
    ],
)
def test_other_results_raise_a_one_line_error(model: Net, result: Callable[[Tensor], Any], message: str) -> None:
    def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return result(x)

    with pytest.raises(InputError, match=message):
        as_attack(wrong)(model, *batch())


def test_passes_are_counted_per_example() -> None:
    """Compare with a model that counts its own passes: batches that shrink, repeat, mix, and graphs used twice or
    never.
    """
    model = Witness().eval()
    x, y = batch()

    def restless(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        near = (x + 0.02).requires_grad_()
        loss = nn.CrossEntropyLoss()
        for _ in range(2):  # the same leaf tensor passed twice
            torch.autograd.grad(loss(model(near), y), near)
        few = near.detach()[[1, 6, 2]].requires_grad_()
        logits = model(few)
        for k in range(5):  # one pass, many gradients
            torch.autograd.grad(logits[:, k].sum(), few, retain_graph=True)
        model(few)  # an unused graph
        with torch.no_grad():
            model(x.repeat_interleave(3, 0))
            model(x[[7]])
            model(x[:0])
        delta = torch.zeros_like(x[3:]).requires_grad_()
        (model(x[3:] + delta)[:, 0].sum() + model(x[3:] - delta)[:, 1].sum()).backward()
        return x

    _, effort = as_attack(restless).run(AttackCall(model, x, y))
    assert torch.equal(effort.forwards, model.forwards)
    assert torch.equal(effort.backwards, model.backwards)
    assert effort.forwards.tolist() == [5, 7, 7, 7, 7, 7, 9, 8]
    assert effort.backwards.tolist() == [2, 7, 7, 4, 4, 4, 9, 4]


def test_images_of_another_shape_are_counted_too(model: Net) -> None:
    def resizing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(nn.functional.interpolate(torch.cat([x, x]), scale_factor=2))
        return x

    assert as_attack(resizing).run(AttackCall(model, *batch()))[1].forwards.tolist() == [2] * 8


def test_gradients_by_torch_func_are_counted(model: Net) -> None:
    def functional(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda z: nn.functional.cross_entropy(model(z), y))(x)
        return (x + EPS * gradient.sign()).clamp(0, 1)

    x, y = batch()
    found, effort = as_attack(functional).run(AttackCall(model, x, y))
    assert torch.equal(found, fgsm(model, x, y, EPS))
    assert effort.forwards.tolist() == effort.backwards.tolist() == [1] * 8


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": {name: None if p.grad is None else (p.grad, p.grad.clone()) for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    }


def unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert all(torch.equal(value, after["state"][name]) for name, value in before["state"].items())
    for name, kept in before["grads"].items():
        now = after["grads"][name]
        assert (kept is None) == (now is None)
        assert kept is None or (kept[0] is now[0] and torch.equal(kept[1], now[1]))
    assert {key: before[key] for key in ("modes", "flags", "hooks")} == {
        key: after[key] for key in ("modes", "flags", "hooks")
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_restored(model: Net, fails: bool) -> None:
    x, y = batch()
    model.train()
    model.drop.eval()
    model.conv.bias.requires_grad_(False)
    model(x).sum().backward()
    model.register_forward_hook(lambda module, inputs, output: None)  # the user's own stays
    clean, before, state = x.clone(), snapshot(model), torch.get_rng_state()

    def rude(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert not model.training
        model.train()
        model.requires_grad_(True)
        model(x).sum().backward()
        model.zero_grad(set_to_none=False)
        torch.manual_seed(0)
        x.zero_()
        if fails:
            raise RuntimeError("on purpose")
        return x

    attack = as_attack(rude)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            attack(model, x, y, generator=noise())
    else:
        attack(model, x, y, generator=noise())
    unchanged(model, before)
    assert torch.equal(x, clean)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_with_gradients_disabled(model: Net, context: type) -> None:
    x, y = batch()
    attack = as_attack(fgsm).within(THREAT)
    expected, _ = attack.run(AttackCall(model, x, y))
    with context():
        found, effort = attack.run(AttackCall(model, x.clone(), y.clone()))
    assert torch.equal(found, expected)
    assert effort.backwards.tolist() == [1] * 8


@pytest.mark.parametrize("images", [torch.float32, torch.float64])
def test_functions_see_plain_logits_in_the_type_of_the_images(images: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net(wordy=True).double().eval()
    x, y = batch()
    seen = []

    def look(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(model(x))
        return fgsm(model, x, y, EPS)

    found = as_attack(look)(model, x.to(images), y)
    assert seen[0].dtype == found.dtype == images
    with torch.no_grad():
        assert torch.allclose(seen[0].double(), model(x.double()).logits)
    model.wordy = False
    assert torch.allclose(found.double(), fgsm(model, x.double(), y, EPS), atol=1e-6)


def test_empty_batch_does_not_call_the_library(model: Net) -> None:
    x, y = batch()
    shift = Shift(EPS)
    found, effort = as_attack(shift).run(AttackCall(model, x[:0], y[:0]))
    assert (found.shape, len(effort.forwards), shift.calls) == (x[:0].shape, 0, 0)
    with pytest.raises(InputError, match="expected one label per image, got 7 labels for 8 images"):
        as_attack(shift)(model, x, y[:7])


def test_scales_and_targets_are_passed_to_functions_with_such_parameters(model: Net) -> None:
    x, y = batch()
    scale, targets = torch.linspace(0, 1, 8), (y + 1) % 5

    def ready(model: nn.Module, x: Tensor, y: Tensor, eps_scale: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        return x + (0.1 * eps_scale + 0 * targets)[:, None, None, None]

    found = as_attack(partial(ready, eps_scale=torch.zeros(8)))(model, x, y, eps_scale=scale, targets=targets)
    assert torch.equal(found, x + 0.1 * scale[:, None, None, None])
    with pytest.raises(InputError, match="jitter needs a parameter 'eps_scale'"):
        as_attack(jitter)(model, x, y, eps_scale=scale)
    with pytest.raises(InputError, match="jitter needs a parameter 'targets'"):
        as_attack(jitter)(model, x, y, targets=targets)


def test_a_stated_threat_must_equal_that_of_the_evaluation() -> None:
    assert as_attack(fgsm).eps is None
    stated = as_attack(Shift(np.float32(8 / 255)))  # type: ignore[arg-type]
    assert (stated.eps, stated.norm) == ("8/255", "Linf")
    assert stated.within(THREAT).threat == THREAT
    assert stated.within(Threat.parse(8 / 255)).eps == str(8 / 255)
    with pytest.raises(
        InputError, match=r"^attack 'Shift' sets eps = 8/255, but runs with eps = 0.0314: set eps in one"
    ):
        stated.within(Threat.parse("0.0314"))
    with pytest.raises(InputError, match=r"^attack 'Shift' sets norm = L2, but runs with norm = Linf: set norm in one"):
        as_attack(Shift(8 / 255, "l2")).within(THREAT)
    with pytest.raises(InputError, match=r"'fgsm' sets eps = 0\.1"):
        as_attack(partial(fgsm, eps=0.1)).within(THREAT)


def test_the_repr_contains_the_settings_and_a_digest_of_the_code(model: Net) -> None:
    def made(steps: int, eps: float = 0.1) -> Callable[..., Tensor]:
        def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return x + steps * eps

        return attack

    def other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x

    things = [fgsm, partial(fgsm, eps=0.1), partial(fgsm, eps=0.2), made(3), made(4), other, Shift(0.1), Shift(0.2)]
    things += [
        made(3, 0.2),
        Shift(0.1).method,
        lambda model, x, y: x,
        partial(Attacker().forward),
        Attacker(),
        PGD(eps=0.1).__call__,
    ]
    texts = [repr(as_attack(thing)) for thing in things]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if " at 0x" in text or "\n" in text]
    assert repr(as_attack(made(3))) == repr(as_attack(made(3))) == texts[3]
    assert "steps=3" in texts[3]
    names = [as_attack(thing).name for thing in things]
    assert names[:5] == ["fgsm", "fgsm", "fgsm", "attack", "attack"]
    assert names[6:11] == ["Shift", "Shift", "attack", "method", "lambda"]
    assert repr(as_attack(fgsm).within(THREAT)).startswith("fgsm(eps='8/255', norm='Linf', code=")


@for_each(
    ("thing", "message"),
    [
        (3, "3 is not an attack: expected a spec like 'pgd:steps=20', an attack object, or a function"),
        (None, "None is not an attack"),
        (object(), "^<object object> is not an attack"),
        ("pgd", "'pgd' is not an attack"),
        (torch.zeros(30, 30), r"\.\.\. is not an attack"),
        (PGD, "PGD is not an attack: expected a spec like 'pgd:steps=20'.*; it is a class: pass PGD"),
        (Shift, "it is a class: pass Shift"),
        (Net(), r"^Net is not an attack: expected a function attack\(model, x, y\), but its parameters are \(x: "),
        (
            lambda x, y: x,
            r"^lambda is not an attack: .* attack\(model, x, y\), but its parameters are \(x, y\)$",
        ),
        (lambda model, x, y, steps: x, r"is not an attack.*, but its parameters are \(model, x, y, steps\)"),
        (PGD(eps=0.1).bind(Net()), r"is not an attack.*, but its parameters are \(x: "),
    ],
    ids=["number", "None", "object", "text", "tensor", "our class", "a class", "model", "no model", "more", "bound"],
)
def test_other_objects_raise_a_one_line_error(thing: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        as_attack(thing)
    assert "\n" not in str(caught.value)
