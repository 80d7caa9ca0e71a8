"""Class-wise methods: one paper a file. Each turns class statistics into class controls."""

from __future__ import annotations

from collections.abc import Mapping

from classwise.policies.uniform import Uniform
from classwise.policies.wat import WAT
from classwise.types import Policy

POLICIES: Mapping[str, type[Policy]] = {
    "uniform": Uniform,
    "wat": WAT,
}

__all__ = ["POLICIES", "WAT", "Uniform"]
