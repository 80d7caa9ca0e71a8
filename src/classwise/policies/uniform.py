"""The baseline without a class-wise method: all classes are treated equally."""

from __future__ import annotations

from dataclasses import dataclass

from classwise.core.types import Policy


@dataclass(kw_only=True)
class Uniform(Policy):
    """No class-wise method: all classes are treated equally."""
