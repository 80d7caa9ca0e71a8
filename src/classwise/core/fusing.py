"""Functions of small operations, such as a step in the ball, that can be compiled into one kernel."""

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
    """Compile a function within ``fusing``, once per input shape; elsewhere it is called directly."""

    @cache
    def fused() -> Callable[P, T]:
        return torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (fused() if _fusing.get() else function)(*args, **kwargs)

    return call


@contextmanager
def fusing() -> Iterator[None]:
    """Compile fusible functions in the block. Takes seconds, so use it for steps that are captured and replayed."""
    before = _fusing.set(True)
    try:
        yield
    finally:
        _fusing.reset(before)
