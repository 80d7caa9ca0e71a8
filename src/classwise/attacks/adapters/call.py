"""Around a call to another library: passes are counted, randomness is seeded, and everything is given back."""

# B batch, N images in one pass of the library

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.core.model_calls import logits_of
from classwise.core.streams import ExampleNoise, PartNoise, Randomness
from classwise.core.types import Effort
from classwise.storage.files import digest


class Meter:
    """Hooks on a model that count the images which pass, and hide its type and the form of its answers."""

    def __init__(self, clean: Tensor, dtype: torch.dtype, wrapped: bool) -> None:
        self.centres = clean.flatten(1).float()
        self.dtype, self.wrapped = dtype, wrapped
        self.asked_in = clean.dtype
        # Whole batches are counted on the host, which costs nothing and works under torch.func, the rest by example.
        self.whole = {"forwards": 0, "backwards": 0}
        self.single = Effort.none(len(clean), clean.device)

    @property
    def effort(self) -> Effort:
        """The passes so far."""
        return Effort(**{name: getattr(self.single, name) + count for name, count in self.whole.items()})

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Count while this lasts."""
        # Of the base class: a scripted module honours such hooks, though its own methods refuse them.
        before = nn.Module.register_forward_pre_hook(module, self._enter, prepend=True)
        after = nn.Module.register_forward_hook(module, self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        images = inputs[0]
        rows = self._rows(images)
        self._count("forwards", rows)
        self.asked_in = images.dtype
        if images.requires_grad and torch.is_grad_enabled():
            # A view of its own for every pass: images asked about twice would else count the second time for both.
            images = images.view_as(images)
            images.register_hook(lambda gradient: self._count("backwards", rows))
        return images.to(self.dtype), *inputs[1:]

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.wrapped:
            return [*output[:-1], logits_of(output[-1]).to(self.asked_in)]
        return logits_of(output).to(self.asked_in)

    def _rows(self, images: Tensor) -> Tensor | None:
        """(N,) the example that each image belongs to; None where the batch is ours, as it stands."""
        size = len(self.centres)
        if len(images) == size:
            return None
        if images.shape[1:].numel() != self.centres.shape[1]:  # of another shape, so there is no nearest
            return torch.arange(len(images), device=self.centres.device) % size
        return torch.cdist(images.detach().flatten(1).to(self.centres), self.centres).argmin(1)

    def _count(self, which: str, rows: Tensor | None) -> None:
        if rows is None:
            self.whole[which] += 1
        else:
            getattr(self.single, which).index_add_(0, rows, torch.ones_like(rows))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What our own attacks never touch, but a library may: gradients of parameters, and statistics of batch norm."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # batch norm changes its own without a sign
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
def kept(parts: list[Any]) -> Iterator[None]:
    """Objects with their attributes given back as they were."""
    before = [(part, dict(vars(part))) for part in parts]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def reproducible(seed: int | None, device: torch.device) -> Iterator[None]:
    """The global random states seeded, and given back as they were."""
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
    """One number of 32 bits, the most that numpy takes, from whatever drives an attack."""
    if isinstance(randomness, ExampleNoise):
        parts = randomness.seed, randomness.draws, randomness.index.tolist()
        return int(digest(*map(str, parts))[:8], 16)
    if randomness is None:
        return None
    generator = randomness.generator if isinstance(randomness, PartNoise) else randomness
    return int(torch.randint(2**32, (1,), generator=generator, device=generator.device))


def torch_generator(randomness: Randomness, seed: int | None, device: torch.device) -> torch.Generator | None:
    """What a function that draws from a generator is given."""
    if isinstance(randomness, ExampleNoise | PartNoise) and seed is not None:
        return torch.Generator(device).manual_seed(seed)
    return randomness if isinstance(randomness, torch.Generator) else None
