"""Chains of small operations that become one kernel where somebody compiles: a step in the ball, a loss of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_fusing = ContextVar("fusing", default=False)


def fusible(function: Callable[P, T]) -> Callable[P, T]:
    """The function as it is, and within ``fusing`` compiled for the shapes it is asked for."""

    @cache
    def fused() -> Callable[P, T]:
        return torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (fused() if _fusing.get() else function)(*args, **kwargs)

    return call


@contextmanager
def fusing() -> Iterator[None]:
    """Compile what is fusible. It takes seconds: for what is recorded once and replayed often."""
    before = _fusing.set(True)
    try:
        yield
    finally:
        _fusing.reset(before)
