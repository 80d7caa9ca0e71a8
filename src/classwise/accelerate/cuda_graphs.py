"""What is done to small batches replayed as CUDA graphs, where launching kernels takes longer than running them."""

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

from classwise.core.model_calls import State, Step, stepped

MAX_BATCH = 768
"""Batches above it keep the device busy by themselves."""
CAPTURE_AFTER = 10
"""Calls with one shape before it is captured: a capture costs about as many."""
MAX_SHAPES = 16
"""Shapes that are kept."""


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, memory: Any = None, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Record what is launched in here, with a workspace for cuBLAS in the graph's own memory.

    Otherwise all graphs share one, and two that run at once spoil each other's products. ``generator``: what is drawn
    from in here, beside the default one.
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
        for one, state in zip(generators, states, strict=True):  # they would go on recording for ever
            one.graphsafe_set_state(torch.Generator(one.device).graphsafe_get_state())
            one.set_state(state)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class GraphedFunction:
    """One function, captured for every shape that comes often. Results are copies and stay as they are.

    What cannot be captured, as it looks at its values, is called.
    """

    def __init__(self) -> None:
        self.failed = False
        self.calls: Counter[tuple[object, ...]] = Counter()
        self.captured: dict[tuple[object, ...], _Graph] = {}
        self.stamp = 0

    @cached_property
    def memory(self) -> Any:
        """Shared by all shapes: no replay comes between a forward and its backward, and results are copied at once."""
        return torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The function of ``x``. It is not kept: in a circle with its owner, neither would be freed in time."""
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
            except Exception:  # whatever a stranger's code does not allow is done without
                self.failed = True
                return function(x)
        graph = self.captured[key]
        self.stamp += 1
        return _replay(x, graph, self) if differentiable else graph.replay(x)


class GraphedSteps:
    """A step of a search captured whole, and replayed: from tensors to tensors of the same shapes."""

    def __init__(self) -> None:
        self.seen = self.step = weakref.ref(_nothing)
        """The last one that came, and the one that is captured. They are not kept, for the same reason."""
        self.graph: torch.cuda.CUDAGraph
        self.state: State = ()
        self.failed = False

    def __call__(self, step: Step, state: State, times: int, memory: Any) -> State:
        """The state after so many steps. A step that is long repeated, or comes again, is captured."""
        again, self.seen = self.seen() is step, weakref.ref(step)
        if self.step() is not step and (again or times > CAPTURE_AFTER) and not self.failed:
            self._capture(step, state, memory)
        if self.step() is not step:
            return stepped(step, state, times)
        for mine, given in zip(self.state, state, strict=True):
            mine.copy_(given)
        for _ in range(times):
            self.graph.replay()
        return tuple(mine.clone() for mine in self.state)

    def _capture(self, step: Step, state: State, memory: Any) -> None:
        self.step, self.graph = weakref.ref(_nothing), torch.cuda.CUDAGraph()
        self.state = tuple(part.clone() for part in state)
        places = {part.untyped_storage().data_ptr() for part in self.state}
        try:
            step(*self.state)  # kernels are loaded at their first call, which cannot be recorded
            with capture(self.graph, memory):
                # What a step hands on as it is must be safe before its place is overwritten.
                after = step(*self.state)
                safe = [part.clone() if part.untyped_storage().data_ptr() in places else part for part in after]
                for mine, new in zip(self.state, safe, strict=True):
                    mine.copy_(new)
        except Exception:  # as above
            self.failed = True
        else:
            self.step = weakref.ref(step)


class _Graph:
    """The kernels of one shape, forward and, where it is differentiable, backward. The caller has run both before."""

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
            raise RuntimeError("the gradient of an earlier call was asked for: its activations are gone")
        ctx.graph.upstream.copy_(upstream[0])
        ctx.graph.backward.replay()
        return ctx.graph.gradient.clone(), None, None


def _nothing() -> State:
    return ()


def _replay(x: Tensor, graph: _Graph, graphs: GraphedFunction) -> Tensor:
    return cast(Tensor, _Replay.apply(x, graph, graphs))  # type: ignore[no-untyped-call]
