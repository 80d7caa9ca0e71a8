"""Two batches in one training pass give the result of two passes."""

# B batch

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from classwise.core.model_calls import both
from classwise.models import digits_cnn, preact_resnet18, resnet18
from classwise.training.model_views import PairedNorm, paired_view


@pytest.mark.parametrize(
    ("make", "shape"),
    [(resnet18, (3, 8, 8)), (preact_resnet18, (3, 8, 8)), (lambda: digits_cnn(in_channels=1), (1, 8, 8))],
    ids=["resnet18", "preact-resnet18", "digits-cnn"],
)
def test_paired_pass_equals_two_passes(make: Callable[[], nn.Module], shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = make().train().double()
    alone = copy.deepcopy(model)
    together = paired_view(model)
    x, x_adv = torch.rand(2, 5, *shape, dtype=torch.float64)
    for _ in range(2):  # statistics of the first step are those the second starts from
        first, second = together(torch.cat([x, x_adv])).chunk(2)
        one, other = both(alone, x, x_adv)
        assert torch.allclose(first, one, rtol=1e-9)
        assert torch.allclose(second, other, rtol=1e-9)
        for logits in ((first, second), (one, other)):
            (logits[0].logsumexp(1) + 2 * logits[1].square().sum(1)).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-7, atol=1e-9), name
    for (name, mine), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine, theirs), name
    assert sum(p.numel() for p in together.parameters()) == sum(p.numel() for p in model.parameters())


def test_paired_view_sees_optimizer_steps() -> None:
    torch.manual_seed(0)
    model = resnet18().train()
    together, x = paired_view(model), torch.rand(4, 3, 8, 8)
    before = together(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert not torch.allclose(together(x), before, atol=1e-4)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False)],
    ids=["cumulative", "not affine", "no statistics"],
)
def test_paired_batch_norms_of_all_kinds(norm: nn.BatchNorm2d) -> None:
    alone, together = copy.deepcopy(norm), PairedNorm(norm)
    for seed in range(3):
        x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) + seed
        assert torch.allclose(together(x), torch.cat([alone(half) for half in x.chunk(2)]), atol=1e-5)
    for mine, theirs in zip(norm.buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_batch_norm_of_bfloat16_is_in_float32() -> None:
    norm = nn.BatchNorm2d(3)
    x = torch.randn(8, 3, 4, 4).bfloat16()
    y = PairedNorm(norm)(x)
    assert y.dtype == torch.bfloat16
    assert norm.running_var is not None
    assert norm.running_var.dtype == torch.float32
