"""Strided 1x1 convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from classwise.accelerate import StridedPointwiseConv, is_strided_pointwise
from classwise.accelerate.folding import ConvReLU, fold_batch_norms, fuse_relus, replace_strided_pointwise
from classwise.models import resnet18


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Run a module under torch.compile with eager kernels."""
    return torch.compile(module, backend="eager", dynamic=False)


@pytest.mark.parametrize("stride", [2, (3, 1), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_of_selected_pixels_is_equal(stride: int, groups: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 1, stride=stride, groups=groups).double()
    assert is_strided_pointwise(conv)
    x = torch.rand(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    one, other = conv(x), compiled(StridedPointwiseConv(conv))(x)
    assert torch.allclose(one, other, rtol=1e-12)
    upstream = torch.randn_like(one)
    wanted = (x, conv.weight, conv.bias)
    found = [torch.autograd.grad(out, wanted, upstream) for out in (one, other)]
    assert all(torch.allclose(mine, theirs, rtol=1e-12) for mine, theirs in zip(*found, strict=True))


def test_other_layers_are_not_replaced() -> None:
    others = [
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(3, 4, (1, 3), stride=2),
        nn.Conv2d(3, 4, 1, stride=2, padding=1),
        nn.Linear(3, 4),
    ]
    assert not any(is_strided_pointwise(layer) for layer in others)


def test_resnet_shortcuts_are_replaced() -> None:
    torch.manual_seed(0)
    plain = fuse_relus(fold_batch_norms(resnet18(num_classes=7).double()))
    thin = replace_strided_pointwise(copy.deepcopy(plain))
    assert sum(isinstance(module, StridedPointwiseConv) for module in thin.modules()) == 3
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(compiled(thin)(x), plain(x), rtol=1e-10)


def test_fused_kernels_are_not_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), nn.ReLU(), nn.Flatten()).eval()
    thin = replace_strided_pointwise(fuse_relus(fold_batch_norms(copy.deepcopy(model))))
    assert any(isinstance(module, ConvReLU) for module in thin.modules())
    assert not any(isinstance(module, StridedPointwiseConv) for module in thin.modules())
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(thin(x), model(x))
