"""No class-wise method: every class is treated alike."""

from __future__ import annotations

from dataclasses import dataclass

from classwise.core.types import Policy


@dataclass(kw_only=True)
class Uniform(Policy):
    """Leaves all controls at one."""
