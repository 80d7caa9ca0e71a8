"""Training objectives: one paper per file. Each turns a batch into per-example loss terms.

Imports ``core``, ``config`` and ``attacks``.
"""

from __future__ import annotations

from collections.abc import Mapping

from classwise.core.types import Objective
from classwise.objectives.bat import BAT
from classwise.objectives.free import Free
from classwise.objectives.hypersphere import HypersphereEmbedding
from classwise.objectives.madry import Madry
from classwise.objectives.mart import Mart
from classwise.objectives.rslad import RSLAD
from classwise.objectives.similarity import Similarity
from classwise.objectives.standard import Standard
from classwise.objectives.trades import Trades

OBJECTIVES: Mapping[str, type[Objective]] = {
    "standard": Standard,
    "madry": Madry,
    "trades": Trades,
    "free": Free,
    "mart": Mart,
    "he": HypersphereEmbedding,
    "similarity": Similarity,
    "bat": BAT,
    "rslad": RSLAD,
}

__all__ = [
    "BAT",
    "OBJECTIVES",
    "RSLAD",
    "Free",
    "HypersphereEmbedding",
    "Madry",
    "Mart",
    "Similarity",
    "Standard",
    "Trades",
]
