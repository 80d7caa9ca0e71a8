"""A function of a batch replayed as CUDA graphs, where launching its kernels takes longer than running them."""

# B batch

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

LARGEST = 768
"""Batches above it keep the device busy by themselves."""
WORTH_IT = 10
"""Calls with one shape before it is captured: a capture costs about as many."""
KEPT = 16
"""Shapes that are kept."""


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, memory: Any = None) -> Iterator[None]:
    """Record what is launched in here, with a workspace for cuBLAS in the graph's own memory.

    Otherwise all graphs share one, and two that run at once spoil each other's products.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, pool=memory):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Graphs:
    """One function, captured for every shape that comes often. Results are copies and stay as they are."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[object, ...]] = Counter()
        self.captured: dict[tuple[object, ...], _Graph] = {}
        self.memory: Any = None
        """Shared by all shapes: no replay comes between a forward and its backward, and results are copied at once."""
        self.stamp = 0

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The function of ``x``. It is not kept: in a circle with its owner, neither would be freed in time."""
        differentiable = torch.is_grad_enabled() and x.requires_grad
        key = (x.shape, x.dtype, differentiable)
        if key not in self.captured:
            self.calls[key] += 1
            if len(x) > LARGEST or self.calls[key] <= WORTH_IT or torch.cuda.is_current_stream_capturing():
                return function(x)
            while len(self.captured) >= KEPT:
                self.captured.pop(next(iter(self.captured)))
            self.memory = self.memory or torch.cuda.graph_pool_handle()
            self.captured[key] = _Graph(function, x.detach(), differentiable, self.memory)
        graph = self.captured[key]
        self.stamp += 1
        return _replay(x, graph, self) if differentiable else graph.replay(x)


class _Graph:
    """The kernels of one shape, forward and, where it is differentiable, backward."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, differentiable: bool, memory: Any) -> None:
        self.x = x.clone().requires_grad_(differentiable)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                trial = x.clone().requires_grad_(differentiable)
                out = function(trial)
                if differentiable:
                    torch.autograd.grad(out.sum(), trial)
        torch.cuda.current_stream().wait_stream(stream)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recorded(self.forward, memory):
            self.out = function(self.x)
        if differentiable:
            self.upstream = torch.empty_like(self.out)
            with recorded(self.backward, memory):
                (self.gradient,) = torch.autograd.grad(self.out, self.x, self.upstream)
        self.out = self.out.detach()

    def replay(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.x.copy_(x)
        self.forward.replay()
        return self.out.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: _Graph, graphs: Graphs) -> Tensor:
        ctx.graph, ctx.graphs, ctx.stamp = graph, graphs, graphs.stamp
        return graph.replay(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        if ctx.stamp != ctx.graphs.stamp:
            raise RuntimeError("the gradient of an earlier call was asked for: its activations are gone")
        ctx.graph.upstream.copy_(upstream[0])
        ctx.graph.backward.replay()
        return ctx.graph.gradient.clone(), None, None


def _replay(x: Tensor, graph: _Graph, graphs: Graphs) -> Tensor:
    return cast(Tensor, _Replay.apply(x, graph, graphs))  # type: ignore[no-untyped-call]
