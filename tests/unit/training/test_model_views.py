"""The bfloat16 view: what is rounded, what is not, and what is shared with the model."""

# B batch, K classes

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from classwise.accelerate import StridedPointwiseConv
from classwise.core.errors import InputError
from classwise.core.model_calls import logits_of
from classwise.models import preact_resnet18, resnet18
from classwise.training.engine import check_precision
from classwise.training.model_views import InFloat32, SplitInputConv, bfloat16_view

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bf16() -> bool:
    try:
        check_precision("bf16", DEVICE)
    except InputError:
        return False
    return True


needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="needs a GPU, or a CPU with bfloat16")


@pytest.mark.parametrize("make", [resnet18, preact_resnet18])
def test_bfloat16_view_shares_tensors_and_keeps_first_and_last_layer(make: type) -> None:
    model = make()
    view = bfloat16_view(model)
    kinds = [type(module) for module in view.modules()]
    assert (kinds.count(SplitInputConv), kinds.count(InFloat32), kinds.count(StridedPointwiseConv)) == (1, 1, 3)
    assert {id(parameter) for parameter in view.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert {id(buffer) for buffer in view.buffers()} == {id(buffer) for buffer in model.buffers()}
    assert not any(isinstance(module, SplitInputConv | InFloat32 | StridedPointwiseConv) for module in model.modules())


def test_single_layer_stays_in_float32() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(DEVICE)
    x = torch.rand(5, 3, 2, 2, device=DEVICE)
    assert torch.equal(bfloat16_view(model)(x), model(x))


@needs_bf16
def test_first_layer_keeps_pixel_precision() -> None:
    conv = nn.Conv2d(1, 1, (1, 2), bias=False)
    conv.weight.data = torch.tensor([[[[-1.0, 1.0]]]])
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(1, 1, bias=False)).to(DEVICE)
    model[2].weight.data.fill_(1.0)
    x = torch.tensor([[[[0.75, 0.7505]]]], device=DEVICE)
    assert bfloat16_view(model)(x).item() == pytest.approx(0.0005, rel=0.02)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert model(x).item() == 0.0


@needs_bf16
def test_bfloat16_view_is_at_least_as_accurate_as_autocast() -> None:
    torch.manual_seed(0)
    exact, plain, own = (copy.deepcopy(one) for one in [resnet18().to(DEVICE).train()] * 3)
    view = bfloat16_view(own).train()
    x, y = torch.rand(64, 3, 32, 32, device=DEVICE), torch.arange(64, device=DEVICE) % 10

    def autocast(images: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return logits_of(plain(images))

    logits = [ask(x) for ask in (exact, autocast, view)]
    for one in logits:
        nn.functional.cross_entropy(one, y).backward()
    assert logits[2].dtype == torch.float32
    assert not torch.equal(logits[2], logits[2].bfloat16().float())  # the head is not in bfloat16
    errors = [((one - logits[0]).norm() / logits[0].norm()).item() for one in logits]
    assert 0 < errors[2] <= errors[1]
    ways = [torch.cat([parameter.grad.flatten() for parameter in one.parameters()]) for one in (exact, plain, own)]
    assert cosine(ways[2], ways[0]) > cosine(ways[1], ways[0]) - 0.005
    for (name, mine), theirs in zip(exact.named_buffers(), own.buffers(), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=0.02, atol=0.02), name


def cosine(one: Tensor, other: Tensor) -> float:
    return nn.functional.cosine_similarity(one, other, dim=0).item()
