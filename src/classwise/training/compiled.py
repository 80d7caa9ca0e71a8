"""The training step as one CUDA graph: attack, losses and gradients replayed without the host.

In the step the model is asked in two ways. In training mode it runs compiled by torch.compile, in bfloat16 with float32
weights. In evaluation mode, where attacks search, its twin stands in, whose folded weights are taken from the model at
the beginning of every step. In both cuDNN's kernels are chosen by trial. What changes with time stays outside of the
graph, where no value can be baked in: the learning rate, the clipping, the optimizer, the average. A batch of another
size than the usual takes the eager step.
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

from classwise.accelerate import Twin, recorded, twin_of
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
"""Steps before a capture, in which kernels are compiled and chosen."""


class Stand(nn.Module):
    """A model whose passes in training and in evaluation mode are different callables.

    In training mode two batches go through in one pass, in which every batch norm takes them for two: first the one,
    then the other, each with its own statistics. So it is the same as two passes, with larger convolutions.
    """

    place: Tensor

    def __init__(self, model: nn.Module, twin: Twin, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros((), device=device))
        views = [model.train(), paired_view(model.train())]
        # In a tuple, where nobody who looks for parameters or modes finds them: they are always in training mode.
        self._modules_in_training = tuple(_Pass(bfloat16_view(one) if precision == "bf16" else one) for one in views)
        self._trained, self._paired = (compiled(one.forward) for one in self._modules_in_training)
        self._searched = compiled(twin.compute)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self._trained(x)
        # With a gradient or without, the same kernels: they round alike, and a search that begins next to the image,
        # as that of TRADES, is led by the difference between the two logits.
        with torch.enable_grad():
            logits = self._searched(x if x.requires_grad else x.detach().requires_grad_())
        return logits if torch.is_grad_enabled() else logits.detach()

    def both(self, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of two batches of one size."""
        if not self.training:
            return self(x), self(x_adv)
        first, second = self._paired(torch.cat([x, x_adv])).chunk(2)
        return first, second


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function compiled for the one shape it is asked for."""
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
    """An engine that replays the steps of one batch size; everything else it does as its parent."""

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
            self.optimizer.zero_grad(set_to_none=True)  # the gradients lie in the memory of the graph
            self.captured = None
            torch.cuda.empty_cache()  # that memory is kept for no one else
        self.failed = False

    def searched(self, model: nn.Module) -> nn.Module:
        if self.captured is None:
            return Engine.searched(self, model)
        self.captured.twin.refresh(model)  # the next step takes the trained model's weights again
        return self.captured.twin

    def _capture(self, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> None:
        began = time.perf_counter()
        try:
            self.captured = _Step(self, x, y, controls, generator)
        except Exception as error:  # a compiler is missing, or an objective looks at its values
            self.failed = True
            warnings.warn(f"the training step cannot be compiled, so it runs eagerly: {one_line(error)}", stacklevel=2)
        torch.cuda.synchronize()
        self.warmup += time.perf_counter() - began


class _Step:
    """One captured step on buffers of its own."""

    def __init__(self, engine: Engine, x: Tensor, y: Tensor, controls: ClassControls, generator: Randomness) -> None:
        if engine.objective.replays > 1:
            raise TypeError(f"{type(engine.objective).__name__} makes several updates on every batch")
        self.engine, self.x, self.y = engine, x.clone(), y.clone()
        self.given = controls
        self.controls = replace(
            controls, **{part.name: getattr(controls, part.name).clone() for part in _tensors(controls)}
        )
        self.model = engine.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if engine.average is not None and engine.average.model is not None:
            engine.average.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with kernels_by_trial():
            twin = twin_of(self.model, x, lowered=engine.precision == "bf16")
            if twin is None:
                raise TypeError("the model has no faster twin")
            self.twin, self.stand = twin, Stand(self.model, twin, engine.precision, x.device)
            self.refresh = compiled(twin.refresh)
            self.graph = torch.cuda.CUDAGraph()
            with _rehearsal(self.model, generator), fusing():
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
        drawn_from = generator if isinstance(generator, torch.Generator) else None
        with recorded(self.graph, generator=drawn_from):
            self.stats, self.loss = self._work(generator)
        self.gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]

    def _work(self, generator: Randomness) -> tuple[ClassStats, Tensor]:
        self.model.train()
        self.stand.train()
        self.refresh(self.model)
        x_adv = self.engine.attacked(self.stand, self.x, self.y, self.controls, generator)
        terms, loss = self.engine.descend(self.stand, self.x, x_adv, self.y, self.controls)
        return ClassStats.of(terms, self.y, self.controls.num_classes), loss

    def fits(self, x: Tensor, controls: ClassControls) -> bool:
        """Whether a batch and its controls are of the shape of the buffers."""
        mine, theirs = ([part.name for part in _tensors(one)] for one in (self.controls, controls))
        return x.shape == self.x.shape and mine == theirs

    def replay(self, x: Tensor, y: Tensor, controls: ClassControls) -> tuple[ClassStats, Tensor]:
        """The same on another batch. Results and gradients are overwritten by the next."""
        self.x.copy_(x)
        self.y.copy_(y)
        if controls is not self.given:
            self.given = controls
            for part in _tensors(controls):
                getattr(self.controls, part.name).copy_(getattr(controls, part.name))
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # an eager step in between leaves its own
        self.graph.replay()
        return self.stats, self.loss


@contextmanager
def kernels_by_trial() -> Iterator[None]:
    """Convolutions of new shapes try every kernel that cuDNN has for them, and stay with the fastest.

    Otherwise cuDNN guesses; either way the choice is remembered for the shape as long as the process lives. Which is
    the fastest may differ from run to run, and so the rounding: whoever asks for determinism is left with the guess.
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
def _rehearsal(model: nn.Module, generator: Randomness) -> Iterator[None]:
    """What is done in here to a model's weights, its statistics and random generators is taken back."""
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
    """The controls of a step that are there; which classes the next batches are drawn from is not its business."""
    return [part for part in fields(controls) if part.name != "sampling" and getattr(controls, part.name) is not None]
