"""Images as two bfloat16 parts."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from classwise.accelerate import can_split_input, split_input, split_weight


def test_two_parts_hold_a_pixel() -> None:
    x = torch.rand(5, 3, 4, 4, requires_grad=True)
    wide = split_input(x)
    high, low, unused = wide[:, :3], wide[:, 3:6], wide[:, 6:]
    assert (high.float() + low.float() - x).abs().max() < 2**-16
    assert not unused.any()
    assert (high.float() - x).abs().max() > 2**-10
    wide.float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_split_convolution_equals_convolution() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 5, 3), torch.rand(2, 3, 8, 8)
    weight, same = (conv.weight.detach().clone().requires_grad_() for _ in range(2))
    out, expected = F.conv2d(split_input(x).float(), split_weight(weight)), F.conv2d(x, same)
    assert torch.allclose(out, expected, atol=1e-4)
    for one in (out, expected):
        one.square().sum().backward()
    assert torch.allclose(weight.grad, same.grad, rtol=1e-3)


def test_can_split_few_channels_in_one_group() -> None:
    assert can_split_input(nn.Conv2d(3, 5, 3))
    assert not can_split_input(nn.Conv2d(5, 5, 3))
    assert not can_split_input(nn.Conv2d(2, 4, 3, groups=2))
    assert not can_split_input(nn.Linear(3, 5))


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("default")
def test_torch_compile_keeps_the_remainder() -> None:
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(torch.compile(split_input, dynamic=False)(x), split_input(x))
