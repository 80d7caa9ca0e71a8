"""Ways to repair a finished model, one a file. Adding one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from classwise.repairs.methods.base import Case, Method, Repaired
from classwise.repairs.methods.bias import Bias

METHODS: dict[str, Callable[..., Method]] = {
    "bias": Bias,
}

__all__ = ["METHODS", "Case", "Method", "Repaired"]
