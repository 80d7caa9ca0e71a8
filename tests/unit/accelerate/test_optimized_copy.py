"""Optimized copies compute the same function; models without an equivalent copy have none."""

# B batch, K classes, C channels

from __future__ import annotations

import copy
import gc
import operator
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from classwise.accelerate import FoldedCopy, make_optimized_copy, search_model
from classwise.accelerate.folding import ConvReLU, conv_relu, fold_batch_norms, fuse_relus, overwrite_in_place
from classwise.accelerate.optimized_copy import NotEquivalent, _as_sum, discrepancy
from classwise.models import digits_cnn, preact_resnet18, resnet18, small_cnn

CPU = torch.device("cpu")


def lively(model: nn.Module) -> nn.Module:
    """Give batch norms random statistics and weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(0.3 * torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
                module.weight.copy_(0.5 + torch.rand(module.num_features, generator=generator))
                module.bias.copy_(0.2 * torch.randn(module.num_features, generator=generator))
    return model.eval()


MODELS: list[tuple[str, Callable[[], nn.Module], tuple[int, int, int]]] = [
    ("digits-cnn", lambda: digits_cnn(in_channels=1), (1, 8, 8)),
    ("small-cnn", lambda: small_cnn(in_channels=1), (1, 28, 28)),
    ("resnet18", lambda: resnet18(num_classes=7), (3, 16, 16)),
    ("preact-resnet18", lambda: preact_resnet18(normalize="cifar10"), (3, 16, 16)),
]
EVERY = pytest.mark.parametrize(("make", "shape"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])


@EVERY
def test_folding_keeps_the_function(make: Callable[[], nn.Module], shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = lively(make()).double()
    x = torch.rand(3, *shape, dtype=torch.float64)
    less = fold_batch_norms(model)
    assert torch.allclose(less(x), model(x), rtol=1e-9, atol=1e-12)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in less.modules()) == sum(
        isinstance(module, nn.BatchNorm2d) for module in model.modules()
    ) - len(less.meta["folds"])


@EVERY
@pytest.mark.parametrize("way", ["in few kernels", "folded"])
def test_refresh_copies_current_weights(way: str, make: Callable[[], nn.Module], shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = lively(make())
    x = torch.rand(4, *shape)
    optimized = FoldedCopy(model, way, CPU, lowered=False)
    assert torch.allclose(optimized(x), model(x), rtol=1e-4, atol=1e-4)
    before = optimized(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.train()
        model(torch.rand(16, *shape))  # new statistics
        model.eval()
        assert not torch.allclose(optimized(x), model(x), atol=1e-3)
        optimized.refresh(model)
        assert torch.allclose(optimized(x), model(x), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(optimized(x), before, atol=1e-3)


def test_copy_does_not_change_its_model() -> None:
    model = digits_cnn(in_channels=1).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    optimized = make_optimized_copy(model, torch.rand(4, 1, 8, 8), lowered=False)
    assert isinstance(optimized, FoldedCopy)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not list(optimized.parameters())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = digits_cnn(in_channels=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.5 * torch.randn(1, 1, 8, 8))


class Branching(nn.Module):
    """A model that cannot be traced: a traced copy would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = digits_cnn(in_channels=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.mean() > 0 else -self.inner(x)


class Frozen(nn.Module):
    """Draws noise that tracing makes constant: the traced copy is deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :10] * (1 + torch.rand(1))


def test_random_models_have_no_copy() -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 1, 8, 8)
    for model in (Noisy(), Frozen()):
        assert search_model(model, x) is model
        with pytest.warns(UserWarning, match="attacks search the model itself"):
            assert search_model(model, x, "compiled") is model


def test_untraceable_model_is_copied_without_folding() -> None:
    model = Branching()
    optimized = search_model(model, torch.rand(8, 1, 8, 8))
    assert isinstance(optimized, FoldedCopy)
    assert optimized.how == "as it is"


def test_eager_and_other_dtypes_search_the_model() -> None:
    model, x = digits_cnn(in_channels=1), torch.rand(4, 1, 8, 8)
    assert search_model(model, x, "eager") is model
    double = digits_cnn(in_channels=1).double()
    assert search_model(double, x) is double


def test_wrong_copies_are_detected() -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 1, 8, 8)
    one, other = digits_cnn(in_channels=1), digits_cnn(in_channels=1)
    assert discrepancy(one, one, x) == 0
    with pytest.raises(NotEquivalent):
        discrepancy(one, other, x)

    class Backwards(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return -gradients[0]

    class Deceiver(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return one(Backwards.apply(x))

    with pytest.raises(NotEquivalent, match="cosine of -1"):
        discrepancy(one, Deceiver(), x)


# What is made for a GPU


@pytest.mark.parametrize("residual", [False, True])
def test_fused_kernel_has_the_right_gradient(residual: bool) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.randn(4, 3, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    added = torch.randn(2, 4, 4, 4, dtype=torch.float64).requires_grad_() if residual else None
    how: Any = ([2, 2], [1, 1], [1, 1], 1)
    torch.library.opcheck(conv_relu, (x, weight, bias, added, *how))
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1).requires_grad_(False)
    conv.weight.data, conv.bias.data = weight, bias  # type: ignore[union-attr]
    inputs = (x,) if added is None else (x, added)
    for way in (ConvReLU(conv), lambda x, added=None: conv_relu(x, weight, bias, added, *how)):
        assert torch.autograd.gradcheck(way, inputs)
        assert torch.equal(way(*inputs), F.relu(conv(x) + (0 if added is None else added)))


def test_torch_compile_uses_the_custom_operator() -> None:
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    layer, x = ConvReLU(nn.Conv2d(3, 4, 3).requires_grad_(False)), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(torch.compile(layer, backend=look)(x), layer(x))
    assert seen == ["classwise.conv_relu.default"]


def test_sums_and_relus_are_fused() -> None:
    torch.manual_seed(0)
    model = lively(resnet18(num_classes=7))
    less = fuse_relus(fold_batch_norms(model))
    # of 20 convolutions the three of the shortcuts have no ReLU of their own
    assert sum(isinstance(module, ConvReLU) for module in less.modules()) == 17
    assert not any(node.target in (F.relu, torch.relu) for node in less.graph.nodes)
    assert len(less.meta["lent"]) == 3
    assert all(less.get_submodule(name).bias is None for name in less.meta["lent"].values())
    assert discrepancy(model, less, torch.rand(4, 3, 16, 16)) < 1e-4


def test_in_place_overwrites_unshared_values() -> None:
    torch.manual_seed(0)
    model = lively(resnet18(num_classes=7))
    plain, frugal = fold_batch_norms(model), overwrite_in_place(fold_batch_norms(model))
    assert sum(node.target is torch.relu_ for node in frugal.graph.nodes) == 17
    assert sum(node.target is operator.iadd for node in frugal.graph.nodes) == 8
    found = []
    for one in (plain, frugal):
        x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        logits = one(x)
        found.append((logits.detach(), torch.autograd.grad(logits.logsumexp(1).sum(), x)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_shared_values_are_not_overwritten() -> None:
    class Forked(nn.Module):
        """A model whose first convolution and ReLU have two readers; the gradient of its sigmoid uses the output."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(2, 2, 1) for _ in range(3))
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            a = self.one(x)
            b = self.relu(a) + torch.sigmoid(self.two(a))
            c = self.relu(torch.sigmoid(self.three(b)))
            return (self.relu(self.three(c) + b) * a).flatten(1)

    torch.manual_seed(0)
    model = Forked().double()
    frugal = overwrite_in_place(fx.symbolic_trace(copy.deepcopy(model)))
    x = torch.rand(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(frugal(x), model(x))
    assert torch.autograd.gradcheck(frugal, (x,))
    for one, other in zip(torch.autograd.grad(frugal(x).sum(), x), torch.autograd.grad(model(x).sum(), x), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_copy_keeps_precision_of_images_and_logits() -> None:
    torch.manual_seed(0)
    model = lively(resnet18(num_classes=7))
    optimized = FoldedCopy(model, "in few kernels", CPU, lowered=True)
    optimized.lowered = False  # no autocast here: this CPU may not have it
    x = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        exact, rounded = model(x), optimized(x)
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - exact).abs().max() < 0.05 * exact.std()
        optimized.refresh(model)
        assert torch.equal(optimized(x), rounded)


def test_refresh_without_folded_batch_norm() -> None:
    model = digits_cnn(in_channels=1)
    optimized = FoldedCopy(model, "in few kernels", CPU, lowered=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    x = torch.rand(3, 1, 8, 8)
    assert not torch.allclose(optimized(x), model.eval()(x), atol=1e-4)
    optimized.refresh(model)
    assert torch.allclose(optimized(x), model(x), atol=1e-5)


def test_small_head_as_sum_of_products() -> None:
    for bias in (True, False):
        layer = nn.Linear(6, 4, bias=bias)
        x = torch.rand(5, 6)
        assert torch.allclose(_as_sum(layer)(x), layer(x), atol=1e-6)


def test_searching_a_model_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search_model(resnet18(), torch.rand(2, 3, 16, 16))


def test_copy_is_freed_with_its_last_reference() -> None:
    """Memory is freed at once, without garbage collection: on a GPU it includes graphs."""
    gc.disable()
    try:
        optimized = make_optimized_copy(resnet18(), torch.rand(2, 3, 16, 16), lowered=False)
        assert optimized is not None
        weights = [weakref.ref(layer.weight) for layer in optimized._body[0].modules() if isinstance(layer, nn.Conv2d)]
        gone = weakref.ref(optimized)
        del optimized
        assert gone() is None
        assert not [weight for weight in weights if weight() is not None]
    finally:
        gc.enable()
