"""The training step as one CUDA graph: attack, losses and gradients replayed without the host.

In training mode the model runs through torch.compile, in bfloat16 with float32 weights. In evaluation mode, where
attacks search, an optimized copy is used, whose folded weights are copied from the model at the start of every step. In
both, cuDNN selects kernels by benchmarking. Learning rate, clipping, optimizer and weight average stay outside the
graph, because values in a graph are constants. A batch of another size runs the eager step.
"""

# B batch, K classes

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from classwise.accelerate import FoldedCopy, capture, make_optimized_copy
from classwise.core.errors import one_line
from classwise.core.fusing import fusing
from classwise.core.model_calls import logits_of
from classwise.core.streams import Randomness
from classwise.core.types import ClassControls, ClassStats
from classwise.training.engine import Engine, Precision
from classwise.training.model_views import bfloat16_view, paired_view

P = ParamSpec("P")
T = TypeVar("T")
WARMUP = 3
"""Steps before a capture, in which kernels are compiled and selected."""


class StepModel(nn.Module):
    """The model of a captured step: separate compiled passes in training and in evaluation mode.

    In training mode ``both`` sends two batches through one pass in which batch norms process them one after the other,
    each with its own statistics. The result is that of two passes, with larger convolutions.
    """

    place: Tensor

    def __init__(self, model: nn.Module, optimized: FoldedCopy, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros((), device=device))
        views = [model.train(), paired_view(model.train())]
        # In a tuple, so that they are not submodules: they stay in training mode and list no parameters.
        self._modules_in_training = tuple(_Pass(bfloat16_view(one) if precision == "bf16" else one) for one in views)
        self._trained, self._paired = (compiled(one.forward) for one in self._modules_in_training)
        self._searched = compiled(optimized.compute)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self._trained(x)
        # The same kernels with and without gradients, so that rounding is equal: a search that starts next to the
        # image, as in TRADES, follows the difference between the two logits.
        with torch.enable_grad():
            logits = self._searched(x if x.requires_grad else x.detach().requires_grad_())
        return logits if torch.is_grad_enabled() else logits.detach()

    def both(self, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of two batches of one size."""
        if not self.training:
            return self(x), self(x_adv)
        first, second = self._paired(torch.cat([x, x_adv])).chunk(2)
        return first, second


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function for one input shape."""
    return torch.compile(function, dynamic=False)


class _Pass(nn.Module):
    """A forward pass in training mode. Logits are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x.contiguous(memory_format=torch.channels_last)))


@dataclass(slots=True, kw_only=True)
class CompiledEngine(Engine):
    """An engine that captures the step for one batch size and replays it; other batches run the eager step."""

    captured: _Step | None = field(default=None, init=False)
    failed: bool = field(default=False, init=False)

    def step(self, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> tuple[ClassStats, Tensor]:
        if self.captured is None and not self.failed:
            self._capture(x, y, controls, generator)
        if self.captured is None or not self.captured.fits(x, controls):
            return Engine.step(self, x, y, controls, generator)
        stats, loss = self.captured.replay(x, y, controls)
        self.update()
        return stats, loss

    def reset(self) -> None:
        if self.captured is not None:
            self.optimizer.zero_grad(set_to_none=True)  # gradients lie in the graph's memory
            self.captured = None
            torch.cuda.empty_cache()  # releases the graph's memory
        self.failed = False

    def searched(self, model: nn.Module) -> nn.Module:
        if self.captured is None:
            return Engine.searched(self, model)
        self.captured.optimized.refresh(model)  # the next step copies the trained model's weights again
        return self.captured.optimized

    def _capture(self, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> None:
        began = time.perf_counter()
        try:
            self.captured = _Step(self, x, y, controls, generator)
        except Exception as error:  # for example: no compiler, or an objective that reads tensor values
            self.failed = True
            warnings.warn(f"the training step cannot be compiled and runs eagerly: {one_line(error)}", stacklevel=2)
        torch.cuda.synchronize()
        self.warmup += time.perf_counter() - began


class _Step:
    """One captured step with its own input buffers."""

    def __init__(self, engine: Engine, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> None:
        if engine.objective.replays > 1:
            raise TypeError(f"{type(engine.objective).__name__} makes several updates per batch")
        self.engine, self.x, self.y = engine, x.clone(), y.clone()
        self.loaded = controls
        self.controls = replace(
            controls, **{part.name: getattr(controls, part.name).clone() for part in _tensors(controls)}
        )
        self.model = engine.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if engine.average is not None and engine.average.model is not None:
            engine.average.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with benchmarked_kernels():
            optimized = make_optimized_copy(self.model, x, lowered=engine.precision == "bf16")
            if optimized is None:
                raise TypeError("the model has no equivalent optimized copy")
            self.optimized, self.step_model = optimized, StepModel(self.model, optimized, engine.precision, x.device)
            self.refresh = compiled(optimized.refresh)
            self.graph = torch.cuda.CUDAGraph()
            with _restored(self.model, generator), fusing():
                self._capture(generator)

    def _capture(self, generator: Randomness) -> None:
        stream = torch.cuda.Stream(self.x.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.engine.optimizer.zero_grad(set_to_none=True)
                self._work(generator)
        torch.cuda.current_stream().wait_stream(stream)
        self.engine.optimizer.zero_grad(set_to_none=True)
        captured_generator = generator if isinstance(generator, torch.Generator) else None
        with capture(self.graph, generator=captured_generator):
            self.stats, self.loss = self._work(generator)
        self.gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]

    def _work(self, generator: Randomness) -> tuple[ClassStats, Tensor]:
        self.model.train()
        self.step_model.train()
        self.refresh(self.model)
        x_adv = self.engine.attacked(self.step_model, self.x, self.y, self.controls, generator)
        terms, loss = self.engine.descend(self.step_model, self.x, x_adv, self.y, self.controls)
        return ClassStats.of(terms, self.y, self.controls.num_classes), loss

    def fits(self, x: Tensor, controls: ClassControls) -> bool:
        """Return whether a batch and its controls have the shapes of the buffers."""
        own, given = ([part.name for part in _tensors(one)] for one in (self.controls, controls))
        return x.shape == self.x.shape and own == given

    def replay(self, x: Tensor, y: Tensor, controls: ClassControls) -> tuple[ClassStats, Tensor]:
        """Run the step on a batch. The next replay overwrites results and gradients."""
        self.x.copy_(x)
        self.y.copy_(y)
        if controls is not self.loaded:
            self.loaded = controls
            for part in _tensors(controls):
                getattr(self.controls, part.name).copy_(getattr(controls, part.name))
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # an eager step in between has replaced it
        self.graph.replay()
        return self.stats, self.loss


@contextmanager
def benchmarked_kernels() -> Iterator[None]:
    """Make cuDNN benchmark all kernels for convolutions of new shapes and keep the fastest.

    Otherwise cuDNN uses a heuristic; either way its choice is cached for the shape until the process ends. The fastest
    kernel, and with it the rounding, may differ between runs: with deterministic algorithms, the heuristic is kept.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    try:
        if not deterministic:
            cudnn.benchmark, cudnn.benchmark_limit = True, 0  # no limit
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def _restored(model: nn.Module, generator: Randomness) -> Iterator[None]:
    """Restore a model's weights, its statistics and random generators at the end of the block."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    generators = [one for one in (generator, default) if isinstance(one, torch.Generator)]
    states = [one.get_state() for one in generators]
    try:
        yield
    finally:
        model.load_state_dict(before)
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)


def _tensors(controls: ClassControls) -> list[Field[Any]]:
    """Return the controls that are set, without ``sampling``, which does not affect a step."""
    return [part for part in fields(controls) if part.name != "sampling" and getattr(controls, part.name) is not None]
