"""Training objectives: one paper a file. Each turns a batch into per-example loss terms."""

from __future__ import annotations

from collections.abc import Mapping

from classwise.objectives.madry import Madry
from classwise.objectives.standard import Standard
from classwise.objectives.trades import Trades
from classwise.types import Objective

OBJECTIVES: Mapping[str, type[Objective]] = {
    "standard": Standard,
    "madry": Madry,
    "trades": Trades,
}

__all__ = ["OBJECTIVES", "Madry", "Standard", "Trades"]
