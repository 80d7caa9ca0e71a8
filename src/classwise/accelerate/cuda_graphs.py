"""CUDA graphs of small batches, which are launch-bound: launching their kernels takes longer than running them."""

# B batch

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from classwise.core.model_calls import State, Step, run_steps

MAX_BATCH = 768
"""Larger batches are not launch-bound."""
CAPTURE_AFTER = 10
"""Calls with one shape before it is captured; a capture costs about as much."""
MAX_SHAPES = 16
"""Number of captured shapes that are kept."""


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, memory: Any = None, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Capture the kernels launched in the block, with a cuBLAS workspace in the graph's own memory.

    With a shared workspace, graphs that run concurrently would corrupt each other's products. ``generator`` is used in
    the block besides the default generator.
    """
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    generators = [default] if generator is None else [default, generator]
    states = [one.get_state() for one in generators]
    if generator is not None:
        graph.register_generator_state(generator)
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, pool=memory):
            yield
    except Exception:
        for one, state in zip(generators, states, strict=True):  # otherwise they would stay in capture mode
            one.graphsafe_set_state(torch.Generator(one.device).graphsafe_get_state())
            one.set_state(state)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class GraphedFunction:
    """A function that is captured for every input shape that is called often. Results are copies.

    A function that cannot be captured, because it reads tensor values, is called.
    """

    def __init__(self) -> None:
        self.failed = False
        self.calls: Counter[tuple[object, ...]] = Counter()
        self.captured: dict[tuple[object, ...], _Graph] = {}
        self.stamp = 0

    @cached_property
    def memory(self) -> Any:
        """The memory pool of all shapes. No replay runs between a forward and its backward, and results are copied."""
        return torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``function(x)``. No reference is kept: a reference cycle with its owner would delay freeing both."""
        if len(x) > MAX_BATCH or self.failed or torch.cuda.is_current_stream_capturing():
            return function(x)
        differentiable = torch.is_grad_enabled() and x.requires_grad
        key = (x.shape, x.dtype, differentiable)
        if key not in self.captured:
            self.calls[key] += 1
            if self.calls[key] <= CAPTURE_AFTER:
                return function(x)
            while len(self.captured) >= MAX_SHAPES:
                self.captured.pop(next(iter(self.captured)))
            try:
                self.captured[key] = _Graph(function, x.detach(), differentiable, self.memory)
            except Exception:  # user code may not allow a capture
                self.failed = True
                return function(x)
        graph = self.captured[key]
        self.stamp += 1
        return _replay(x, graph, self) if differentiable else graph.replay(x)


class GraphedSteps:
    """A search step, from tensors to tensors of the same shapes, that is captured and replayed."""

    def __init__(self) -> None:
        self.seen = self.step = weakref.ref(_nothing)
        """The last step and the captured step; weak references, for the same reason."""
        self.graph: torch.cuda.CUDAGraph
        self.state: State = ()
        self.failed = False

    def __call__(self, step: Step, state: State, times: int, memory: Any) -> State:
        """Return the state after ``times`` steps. A step that is repeated often, or called again, is captured."""
        repeated, self.seen = self.seen() is step, weakref.ref(step)
        if self.step() is not step and (repeated or times > CAPTURE_AFTER) and not self.failed:
            self._capture(step, state, memory)
        if self.step() is not step:
            return run_steps(step, state, times)
        for own, given in zip(self.state, state, strict=True):
            own.copy_(given)
        for _ in range(times):
            self.graph.replay()
        return tuple(part.clone() for part in self.state)

    def _capture(self, step: Step, state: State, memory: Any) -> None:
        self.step, self.graph = weakref.ref(_nothing), torch.cuda.CUDAGraph()
        self.state = tuple(part.clone() for part in state)
        storages = {part.untyped_storage().data_ptr() for part in self.state}
        try:
            step(*self.state)  # the first call loads kernels, which cannot be captured
            with capture(self.graph, memory):
                # Outputs that alias the state must be cloned before the state is overwritten.
                after = step(*self.state)
                results = [part.clone() if part.untyped_storage().data_ptr() in storages else part for part in after]
                for own, new in zip(self.state, results, strict=True):
                    own.copy_(new)
        except Exception:  # user code may not allow a capture
            self.failed = True
        else:
            self.step = weakref.ref(step)


class _Graph:
    """The captured forward and, if differentiable, backward of one shape. The caller has run both before."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, differentiable: bool, memory: Any) -> None:
        self.x = x.clone().requires_grad_(differentiable)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capture(self.forward, memory):
            self.out = function(self.x)
        if differentiable:
            self.upstream = torch.empty_like(self.out)
            with capture(self.backward, memory):
                (self.gradient,) = torch.autograd.grad(self.out, self.x, self.upstream)
        self.out = self.out.detach()

    def replay(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.x.copy_(x)
        self.forward.replay()
        return self.out.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: _Graph, graphs: GraphedFunction) -> Tensor:
        ctx.graph, ctx.graphs, ctx.stamp = graph, graphs, graphs.stamp
        return graph.replay(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        if ctx.stamp != ctx.graphs.stamp:
            raise RuntimeError("backward of an earlier call: a later call has overwritten its activations")
        ctx.graph.upstream.copy_(upstream[0])
        ctx.graph.backward.replay()
        return ctx.graph.gradient.clone(), None, None


def _nothing() -> State:
    return ()


def _replay(x: Tensor, graph: _Graph, graphs: GraphedFunction) -> Tensor:
    return cast(Tensor, _Replay.apply(x, graph, graphs))  # type: ignore[no-untyped-call]
