"""Calling another library: passes are counted, randomness is seeded, and the model is restored."""

# B batch, N images in one pass of the library

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks.problem import PassCounter
from classwise.core.model_calls import logits_of
from classwise.core.streams import ExampleNoise, PartNoise, Randomness
from classwise.core.types import Effort
from classwise.storage.files import digest


class ModelHooks:
    """Hooks that count the passes per example, and convert between the types of the library and of the model.

    A pass of as many images as the batch counts once for each example. In a pass of any other size, which happens when
    a library drops broken examples, each image counts for the example it is nearest to.
    """

    def __init__(self, natural: Tensor, dtype: torch.dtype, *, returns_list: bool) -> None:
        self.centers = natural.flatten(1).float()
        self.dtype, self.returns_list = dtype, returns_list
        self.input_dtype = natural.dtype
        self.rows = torch.arange(len(natural), device=natural.device)
        self.counter = PassCounter(len(natural), natural.device)

    @property
    def effort(self) -> Effort:
        """The passes counted so far."""
        return self.counter.effort

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Hook a module for the duration of the context."""
        # Methods of the base class: a scripted module supports such hooks, but its own methods refuse them.
        before = nn.Module.register_forward_pre_hook(module, self._before, prepend=True)
        after = nn.Module.register_forward_hook(module, self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        images = inputs[0]
        rows = self._examples(images)
        self._count(rows, forwards=1)
        self.input_dtype = images.dtype
        if images.requires_grad and torch.is_grad_enabled():
            # A view per pass: otherwise a tensor that is passed twice would run both hooks for each gradient.
            images = images.view_as(images)
            images.register_hook(lambda gradient: self._count(rows, backwards=1))
        return images.to(self.dtype), *inputs[1:]

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.returns_list:
            return [*output[:-1], logits_of(output[-1]).to(self.input_dtype)]
        return logits_of(output).to(self.input_dtype)

    def _examples(self, images: Tensor) -> Tensor:
        """Return the example (N,) that each image belongs to."""
        size = len(self.centers)
        if len(images) == size:
            return self.rows
        if images.shape[1:].numel() != self.centers.shape[1]:  # of another shape, so there is no nearest
            return torch.arange(len(images), device=self.centers.device) % size
        return torch.cdist(images.detach().flatten(1).to(self.centers), self.centers).argmin(1)

    def _count(self, rows: Tensor, **passes: int) -> None:
        self.counter.add(rows, **passes)
        if rows is not self.rows:
            self.counter.settle()  # immediately: under torch.func these indices are invalid after the pass


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore the gradients of a model's parameters and its buffers, which a library may change."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # batch norm does not raise their versions
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def preserve_attributes(parts: list[Any]) -> Iterator[None]:
    """Restore the attributes of objects."""
    before = [(part, dict(vars(part))) for part in parts]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def reproducible(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed the global random states of torch, numpy and Python, and restore them; None leaves them as they are."""
    if seed is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_of(randomness: Randomness) -> int | None:
    """Return a seed of 32 bits, the most that numpy accepts; None for the global random state."""
    if isinstance(randomness, ExampleNoise):
        parts = randomness.seed, randomness.draws, randomness.index.tolist()
        return int(digest(*map(str, parts))[:8], 16)
    if randomness is None:
        return None
    generator = randomness.generator if isinstance(randomness, PartNoise) else randomness
    return int(torch.randint(2**32, (1,), generator=generator, device=generator.device))


def torch_generator(randomness: Randomness, seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return the torch generator to pass to a function."""
    if isinstance(randomness, ExampleNoise | PartNoise) and seed is not None:
        return torch.Generator(device).manual_seed(seed)
    return randomness if isinstance(randomness, torch.Generator) else None
