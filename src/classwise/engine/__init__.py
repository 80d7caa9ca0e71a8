"""Ways to compute the same faster."""

from classwise.engine.graphs import recorded
from classwise.engine.halves import fits, halves, widened
from classwise.engine.thinning import ThinConv, thins
from classwise.engine.twin import EngineName, Twin, give_back, searcher, twin_of

__all__ = [
    "EngineName",
    "ThinConv",
    "Twin",
    "fits",
    "give_back",
    "halves",
    "recorded",
    "searcher",
    "thins",
    "twin_of",
    "widened",
]
