"""Counts of the images that pass forward through models and of the gradients that pass back."""

# B batch

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

REPORT_SECONDS = 1.0
"""Minimum time between two reports."""


@dataclass(slots=True)
class Passes:
    """Number of passes through a model."""

    calls: int = 0
    """Forward passes of a batch."""
    forwards: int = 0
    """Images that passed forward."""
    backwards: int = 0
    """Gradients that arrived at images; 0 where gradients are not counted."""


@contextmanager
def count_passes(
    *modules: nn.Module, gradients: bool = True, report: Callable[[Passes], None] | None = None
) -> Iterator[Passes]:
    """Count the passes through ``modules``, none of which may call another.

    ``gradients`` also counts the images of a batch each time a gradient arrives at them, which gives the model a view
    of its input. ``report`` is called during forward passes, at most once a second.
    """
    passes = Passes()
    reported = time.monotonic()

    def back(gradient: Tensor) -> None:
        passes.backwards += len(gradient)

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal reported
        x = inputs[0]
        passes.calls += 1
        passes.forwards += len(x)
        if report is not None and time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            report(passes)
        if not (gradients and x.requires_grad and torch.is_grad_enabled()):
            return None
        x = x.view_as(x)  # the same images may be passed again: each pass needs its own tensor
        x.register_hook(back)
        return x, *inputs[1:]

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
        yield passes
