"""Figures: titles, numbers, axes and a text alternative. They are drawn when a page or a file asks for them.

Every figure of a page, an analysis, a repair or a paper is one of these kinds: bars, lines, points, a heatmap (with it
every confusion matrix), a radar chart, or a gallery of images.
"""

from classwise.reporting.figures.bars import Bars, bars
from classwise.reporting.figures.base import (
    DASHES,
    INK,
    NARROW,
    READABLE,
    SERIES_COLORS,
    SOFT,
    SYMBOLS,
    Figure,
    Plot,
    Series,
    gallery,
)
from classwise.reporting.figures.curves import Lines, Points, lines, place_label, points
from classwise.reporting.figures.gallery import Card, Gallery, Picture, png
from classwise.reporting.figures.heatmap import Heatmap, heatmap, off_diagonal
from classwise.reporting.figures.radar import Radar, radar

__all__ = [
    "DASHES",
    "INK",
    "NARROW",
    "READABLE",
    "SERIES_COLORS",
    "SOFT",
    "SYMBOLS",
    "Bars",
    "Card",
    "Figure",
    "Gallery",
    "Heatmap",
    "Lines",
    "Picture",
    "Plot",
    "Points",
    "Radar",
    "Series",
    "bars",
    "gallery",
    "heatmap",
    "lines",
    "off_diagonal",
    "place_label",
    "png",
    "points",
    "radar",
]
