"""Ways to compute the same faster."""

from classwise.engine.graphs import recorded
from classwise.engine.twin import EngineName, Twin, searcher, twin_of

__all__ = ["EngineName", "Twin", "recorded", "searcher", "twin_of"]
