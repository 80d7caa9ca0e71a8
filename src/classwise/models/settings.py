"""Settings of model factories: their types, and those that every architecture has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field
from torch import nn

from classwise.core.errors import InputError
from classwise.models.hypersphere import with_hypersphere
from classwise.models.normalize import with_normalization

Count = Annotated[int, Field(ge=1, le=100_000)]
"""A number of classes, channels or layers."""

Probability = Annotated[float, Field(ge=0, lt=1)]
"""A dropout probability."""

Normalization = Literal["cifar10", "cifar100", "imagenet", "mnist"]
"""A data set whose channel means and standard deviations a model can use."""

Head = Literal["linear", "hypersphere"]
"""The last layer."""

_SHARED = {"normalize": (Normalization | None, None), "head": (Head, "linear")}


def architecture(factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Add the settings ``normalize`` and ``head`` to a model factory, a class or a function.

    The factory takes keyword settings only, among them ``num_classes`` and ``in_channels``.
    """
    signature = inspect.signature(factory)

    @wraps(factory, updated=())  # not the attributes of a class
    def make(*, normalize: str | None = None, head: Head = "linear", **settings: Any) -> nn.Module:
        in_channels = settings.get("in_channels", signature.parameters["in_channels"].default)
        model = with_normalization(factory(**settings), normalize, in_channels)
        return with_hypersphere(model) if head == "hypersphere" else model

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _SHARED.items()
    ]
    make.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *shared])  # type: ignore[attr-defined]
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory, include_extras=True)
    make.__annotations__ = hints | {name: kind for name, (kind, _) in _SHARED.items()}
    return make


def require_size(model: str, key: str, value: Any, wanted: int | None) -> None:
    """Require that ``num_classes`` or ``in_channels`` of a model is that of the data, if known."""
    if wanted is None or value == wanted:
        return
    if key == "num_classes":
        raise InputError(f"model {model!r} has {value} outputs, but the data has {wanted} classes")
    raise InputError(f"model {model!r} expects {value} channel{'s' * (value != 1)}, but the data has {wanted}")
