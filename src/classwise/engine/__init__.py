"""Ways to compute the same faster."""

from classwise.engine.graphs import recorded
from classwise.engine.halves import fits, halves, widened
from classwise.engine.twin import EngineName, Twin, searcher, twin_of

__all__ = ["EngineName", "Twin", "fits", "halves", "recorded", "searcher", "twin_of", "widened"]
