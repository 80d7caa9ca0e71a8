"""Ways to compute the same faster."""

from classwise.accelerate.graphs import recorded
from classwise.accelerate.halves import fits, halves, widened
from classwise.accelerate.thinning import ThinConv, thins
from classwise.accelerate.twin import Twin, give_back, searcher, twin_of

__all__ = [
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
