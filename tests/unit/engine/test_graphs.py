"""CUDA graphs of a function, on a GPU: the same numbers, copies that stay, and gradients of the last call alone."""

# B batch

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from classwise.engine.graphs import LARGEST, WORTH_IT, Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there are no graphs elsewhere")


def function(x: Tensor) -> Tensor:
    return (3 * x).sin().cumsum(1)


def test_replays_are_calls() -> None:
    graphs = Graphs()
    kept = []
    for number in range(WORTH_IT + 5):
        x = torch.rand(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
        with torch.no_grad():
            kept.append((graphs(function, x), function(x)))
    assert len(graphs.captured) == 1
    assert all(torch.allclose(mine, theirs) for mine, theirs in kept)


def test_gradients_too() -> None:
    graphs = Graphs()
    for number in range(WORTH_IT + 5):
        x = torch.rand(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(number)).requires_grad_()
        weight = torch.rand(4, 6, device="cuda")
        (mine,) = torch.autograd.grad((weight * graphs(function, x)).sum(), x, retain_graph=True)
        (theirs,) = torch.autograd.grad((weight * function(x)).sum(), x)
        assert torch.allclose(mine, theirs, atol=1e-6)
    several = graphs(function, x)
    parts = [torch.autograd.grad(several[:, j].sum(), x, retain_graph=True)[0] for j in range(3)]
    assert not torch.equal(parts[0], parts[1])


def test_a_gradient_whose_activations_are_gone_is_refused() -> None:
    graphs = Graphs()
    x = torch.rand(4, 6, device="cuda").requires_grad_()
    for _ in range(WORTH_IT + 1):
        early = graphs(function, x)
    graphs(function, x)
    with pytest.raises(RuntimeError, match="activations are gone"):
        early.sum().backward()


def test_large_batches_are_left_alone() -> None:
    graphs = Graphs()
    x = torch.rand(LARGEST + 1, 2, device="cuda")
    for _ in range(WORTH_IT + 3):
        graphs(function, x)
    assert not graphs.captured
