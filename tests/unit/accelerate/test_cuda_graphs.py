"""CUDA graphs on a GPU: equal results, returned as copies; gradients of the last call only; repeated steps."""

# B batch

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import classwise as cw
from classwise.accelerate import cuda_graphs as module
from classwise.accelerate import make_optimized_copy, release_memory
from classwise.accelerate.cuda_graphs import CAPTURE_AFTER, MAX_BATCH, GraphedFunction, GraphedSteps
from classwise.attacks import APGD, FAB, PGD, CosinePGD, Square
from classwise.attacks.base import BallAttack
from classwise.core.streams import ExampleNoise
from classwise.core.types import AttackCall
from classwise.models import digits_cnn, resnet18

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there are no graphs elsewhere")


def function(x: Tensor) -> Tensor:
    return (3 * x).sin().cumsum(1)


def test_replay_equals_call() -> None:
    graphs = GraphedFunction()
    kept = []
    for number in range(CAPTURE_AFTER + 5):
        x = torch.rand(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
        with torch.no_grad():
            kept.append((graphs(function, x), function(x)))
    assert len(graphs.captured) == 1
    assert all(torch.allclose(mine, theirs) for mine, theirs in kept)


def test_replayed_gradient_equals_gradient() -> None:
    graphs = GraphedFunction()
    for number in range(CAPTURE_AFTER + 5):
        x = torch.rand(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(number)).requires_grad_()
        weight = torch.rand(4, 6, device="cuda")
        (mine,) = torch.autograd.grad((weight * graphs(function, x)).sum(), x, retain_graph=True)
        (theirs,) = torch.autograd.grad((weight * function(x)).sum(), x)
        assert torch.allclose(mine, theirs, atol=1e-6)
    several = graphs(function, x)
    parts = [torch.autograd.grad(several[:, j].sum(), x, retain_graph=True)[0] for j in range(3)]
    assert not torch.equal(parts[0], parts[1])


def test_gradient_of_an_earlier_call_raises() -> None:
    graphs = GraphedFunction()
    x = torch.rand(4, 6, device="cuda").requires_grad_()
    for _ in range(CAPTURE_AFTER + 1):
        early = graphs(function, x)
    graphs(function, x)
    with pytest.raises(RuntimeError, match="overwritten its activations"):
        early.sum().backward()


def test_large_batches_are_not_captured() -> None:
    graphs = GraphedFunction()
    x = torch.rand(MAX_BATCH + 1, 2, device="cuda")
    for _ in range(CAPTURE_AFTER + 3):
        graphs(function, x)
    assert not graphs.captured


def test_function_that_reads_values_is_called() -> None:
    graphs = GraphedFunction()
    x = torch.rand(4, 2, device="cuda")
    for _ in range(CAPTURE_AFTER + 3):
        assert torch.equal(graphs(lambda x: x * (2 if float(x.sum()) > 0 else 3), x), 2 * x)
    assert graphs.failed
    assert len(set(torch.rand(8, device="cuda").tolist())) == 8  # the device and its generator still work


def fibonacci(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return one + other, one  # the first is passed unchanged


def numbers(one: int, other: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([one], device="cuda"), torch.tensor([other], device="cuda")


def test_steps_are_replayed() -> None:
    loops = GraphedSteps()
    memory = torch.cuda.graph_pool_handle()
    found = loops(fibonacci, numbers(1, 0), 50, memory)
    assert loops.step() is fibonacci
    again = loops(fibonacci, numbers(2, 1), 10, memory)
    assert [int(part) for part in found] == [20365011074, 12586269025]
    assert [int(part) for part in again] == [233, 144]


def test_repeated_step_is_captured_and_replaced() -> None:
    loops, memory = GraphedSteps(), torch.cuda.graph_pool_handle()
    state = numbers(1, 0)
    for _ in range(2):
        state = loops(fibonacci, state, 3, memory)
    assert loops.step() is fibonacci

    def double(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * one, other

    assert [int(part) for part in loops(double, state, CAPTURE_AFTER + 1, memory)] == [13 * 2 ** (CAPTURE_AFTER + 1), 8]
    assert loops.step() is double
    gone = weakref.ref(double)
    del double
    gc.collect()
    assert gone() is None


def test_step_that_reads_values_is_called() -> None:
    def collatz(one: Tensor) -> tuple[Tensor]:
        return (one // 2 if int(one) % 2 == 0 else 3 * one + 1,)

    loops = GraphedSteps()
    (end,) = loops(collatz, (torch.tensor([27], device="cuda"),), 111, torch.cuda.graph_pool_handle())
    assert int(end) == 1
    assert loops.failed


@pytest.mark.parametrize(
    "attack",
    [
        PGD(steps=20, restarts=2, eps=0.1),
        CosinePGD(steps=20, target="all", num_targets=3, eps=0.1),
        APGD(steps=60, loss="dlr", target="all", num_targets=3, eps=0.1),
        APGD(steps=30, eps=0.1),
        FAB(steps=30, target="all", num_targets=3, eps=0.1),
        Square(queries=400, eps=0.1),
    ],
    ids=lambda attack: f"{type(attack).__name__}-{attack.eps}",
)
def test_attacks_equal_with_and_without_graphs(attack: BallAttack, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = digits_cnn(num_classes=10).eval().cuda()
    x = torch.rand(40, 1, 8, 8, device="cuda")
    y = model(x).argmax(1)
    found = []
    for largest in (MAX_BATCH, 0):
        monkeypatch.setattr(module, "MAX_BATCH", largest)
        monkeypatch.setattr("classwise.accelerate.optimized_copy.MAX_BATCH", largest)
        optimized = make_optimized_copy(model, x, lowered=False)
        assert optimized is not None
        found.append(attack.run(AttackCall(optimized, x, y, generator=ExampleNoise(0, torch.arange(len(x))))))
        assert bool(optimized._loops.state) == (largest > 0)
    (mine, effort), (theirs, same) = found
    assert (mine - theirs).abs().amax() < 1e-4
    assert torch.equal(effort.forwards, same.forwards)
    assert torch.equal(effort.backwards, same.backwards)


def test_graph_memory_is_released() -> None:
    """The copy can still be used and captures again."""
    torch.manual_seed(0)
    model = resnet18().eval().cuda()
    x = torch.rand(100, 3, 32, 32, device="cuda")
    optimized = make_optimized_copy(model, x, lowered=True)
    assert optimized is not None
    with torch.no_grad():
        for _ in range(CAPTURE_AFTER + 1):
            logits = optimized(x)
    assert optimized._graphs.captured
    held = torch.cuda.memory_reserved()
    release_memory(optimized)
    given = held - torch.cuda.memory_reserved()
    assert given >= 8 * 2**20  # a batch has 12.5 MiB after the first layer alone
    assert not optimized._graphs.captured
    with torch.no_grad():
        for _ in range(CAPTURE_AFTER + 1):
            again = optimized(x)
    assert optimized._graphs.captured
    assert torch.allclose(again, logits, atol=1e-2)


def test_consecutive_evaluations_do_not_accumulate_memory() -> None:
    torch.manual_seed(0)
    model = resnet18().eval().cuda()
    x = torch.rand(100, 3, 32, 32)
    with torch.no_grad():
        y = model(x.cuda()).argmax(1).cpu()
    held = []
    for _ in range(3):
        cw.evaluate(model, (x.numpy(), y.numpy()), attacks=["fast:steps=10,queries=50"], eps="1/255")
        held.append(torch.cuda.memory_reserved())
    assert held[2] <= held[0] + 2**26  # small differences of placement are allowed; the graphs take hundreds of MiB
