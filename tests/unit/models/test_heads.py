"""Class biases in a model: in its last linear layer if its outputs are the logits, else in a wrapper."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from classwise.core.errors import InputError
from classwise.core.model_calls import logits_of
from classwise.models import DigitsCNN, HypersphereHead, normalized
from classwise.models.heads import Biased, features_of, head_of, plain_head, with_biases
from classwise.models.load import build_model
from each import for_each

K = 4
BIASES = torch.tensor([0.5, -1.25, 0.0, 0.75])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def images(size: int = 12) -> Tensor:
    return torch.rand(size, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return logits_of(model.eval()(x))


class Temperature(nn.Module):
    """Logits divided by a constant after the last layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) / 3


class Twice(nn.Module):
    """The last layer runs twice, on features and on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.last(self.first(x.flatten(1))).relu())


@dataclass
class Output:
    logits: Tensor


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, K)

    def forward(self, x: Tensor) -> Output:
        return Output(self.linear(x.flatten(1)))


class Functional(nn.Module):
    """No linear layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, K))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


PLAIN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "digits-cnn": (lambda: DigitsCNN(num_classes=K), "linear"),
    "sequential": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, K)), "3"),
    "normalized": (lambda: normalized(DigitsCNN(num_classes=K), [0.3], [0.4]), "linear"),
    "dropout": (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, K)), "2"),
    "an object with logits": (Wrapped, "linear"),
    "small-cnn": (lambda: build_model("preact-resnet18", num_classes=K, in_channels=1), "linear"),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, K, bias=False)),
    "hypersphere head": lambda: build_model("digits-cnn:head=hypersphere", num_classes=K, in_channels=1),
    "temperature": lambda: Temperature(DigitsCNN(num_classes=K)),
    "a layer after it": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, K), nn.Tanh()),
    "another order of classes": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, K), nn.Unflatten(1, (2, K // 2)), nn.Flatten(), nn.Softsign()
    ),
    "runs twice": Twice,
    "no linear layer": Functional,
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, K, 8), nn.Flatten()),
    "an inner layer of as many outputs": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, K), nn.ReLU(), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, K, 2), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_biases_are_added_to_the_last_layer(name: str) -> None:
    make, layer = PLAIN[name]
    model, x = seeded(make).eval(), images()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changed, found = with_biases(model, BIASES, x)
    assert found is not None
    assert found.endswith(layer)
    assert type(changed) is type(model)
    difference = logits(changed, x) - logits(model, x)
    torch.testing.assert_close(difference, BIASES.expand(len(x), K), atol=2e-6, rtol=0)
    after = changed.state_dict()
    assert after.keys() == before.keys()
    assert {key for key in before if not torch.equal(after[key], before[key])} == {f"{found}.bias"}
    torch.testing.assert_close(after[f"{found}.bias"], before[f"{found}.bias"] + BIASES)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@for_each("name", OTHER)
def test_other_models_are_wrapped(name: str) -> None:
    model, x = seeded(OTHER[name]).eval(), images()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changed, layer = with_biases(model, BIASES, x)
    assert layer is None
    assert isinstance(changed, Biased)
    torch.testing.assert_close(logits(changed, x), logits(model, x) + BIASES, atol=1e-6, rtol=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state = changed.state_dict()
    assert torch.equal(state.pop("class_bias"), BIASES)
    assert state.keys() == {f"model.{key}" for key in before}
    assert all(torch.equal(value, before[key.removeprefix("model.")]) for key, value in state.items())


@pytest.mark.parametrize("make", [lambda: DigitsCNN(num_classes=K), OTHER["hypersphere head"]])
def test_copy_shares_no_tensors_with_the_original(make: Callable[[], nn.Module]) -> None:
    model, x = seeded(make).train(), images()
    before = logits(model, x)
    model.train()
    biases = BIASES.clone()
    changed, _ = with_biases(model, biases, x)
    assert model.training
    after = logits(changed, x)
    biases += 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(logits(changed, x), after)
    torch.testing.assert_close(after, before + BIASES, atol=1e-5, rtol=0)
    assert all(parameter.requires_grad for parameter in changed.parameters())


@settings(max_examples=25, deadline=None)
@given(
    biases=st.lists(st.floats(-5, 5, width=32), min_size=K, max_size=K),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    hypersphere=st.booleans(),
)
def test_any_biases(biases: list[float], scale: float, hypersphere: bool) -> None:
    model, x = seeded(OTHER["hypersphere head"] if hypersphere else lambda: DigitsCNN(num_classes=K)).eval(), images(3)
    shift = scale * torch.tensor(biases)
    changed, layer = with_biases(model, shift, x)
    assert (layer is None) == hypersphere
    rounding = 1e-6 * (1 + float(shift.abs().max()))
    torch.testing.assert_close(logits(changed, x) - logits(model, x), shift.expand(3, K), atol=rounding, rtol=0)


@pytest.mark.parametrize("name", ["digits-cnn", "hypersphere head"])
def test_biases_accumulate(name: str) -> None:
    model, x = seeded(PLAIN[name][0] if name in PLAIN else OTHER[name]).eval(), images()
    once, first = with_biases(model, BIASES, x)
    twice, second = with_biases(once, BIASES, x)
    assert first == second
    assert twice.state_dict().keys() == once.state_dict().keys()
    torch.testing.assert_close(logits(twice, x), logits(model, x) + 2 * BIASES, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(once, x), logits(model, x) + BIASES, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["digits-cnn", "hypersphere head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, x = seeded(PLAIN[name][0] if name in PLAIN else OTHER[name]).eval().to(dtype), images()
    changed, _ = with_biases(model, BIASES, x)
    rounding = 1e-6 if dtype == torch.float64 else 0.02
    expected = logits(model, x.to(dtype)).double() + BIASES
    torch.testing.assert_close(logits(changed, x.to(dtype)).double(), expected, atol=rounding, rtol=rounding)


def test_the_last_layer() -> None:
    x = images()
    for make, layer in PLAIN.values():
        model = seeded(make)
        found = head_of(model, x)
        assert found is not None
        assert found[0].endswith(layer)
        assert found[1] is model.get_submodule(found[0])
    assert head_of(seeded(OTHER["convolution"]), x) is None
    assert head_of(nn.Sequential(nn.Flatten(), nn.Linear(64, K), nn.Linear(K, 3), nn.ZeroPad1d((0, 1))), x) is None
    assert isinstance(head_of(seeded(OTHER["hypersphere head"]), x)[1], HypersphereHead)


def test_hooks_are_removed() -> None:
    model = seeded(lambda: DigitsCNN(num_classes=K))
    with_biases(model, BIASES, images())
    head = plain_head(model, images())
    features, out = features_of(model, head, images())
    torch.testing.assert_close(features @ head.weight.T + head.bias, out)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["hypersphere head", "temperature", "convolution"])
def test_missing_plain_head_is_a_one_line_error(name: str) -> None:
    with pytest.raises(InputError) as caught:
        plain_head(seeded(OTHER[name]), images())
    assert "\n" not in str(caught.value)
