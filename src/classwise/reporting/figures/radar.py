"""Radar charts."""

# K classes, C channels, H height, W width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from classwise.reporting import plotting
from classwise.reporting.figures.base import (
    DASHES,
    LINE_STYLES,
    MARKERS,
    NARROW,
    SYMBOLS,
    Figure,
    Plot,
    Series,
    plot_series,
)
from classwise.reporting.plotting import COLORS, LETTER, extent, new, note, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Radar(Plot):
    """Radar chart: one direction per name; a series has a gap where a value is missing."""

    names: Sequence[str]
    unit: str = ""
    span: tuple[float, float] | None = None

    sizes: tuple[float, ...] = (NARROW, 600.0)

    def draw(self, width: float, size: float) -> Drawing:
        beside = min(extent(self.names, size, 14), 0.26 * width) + size
        above = size * (2.6 + 1.7 * self.legend_rows(width, size))
        across = width - 2 * beside
        margins = (beside, beside, above, 2.6 * size)
        drawing, axes = new(width, across + above + 2.6 * size, margins, polar=True)
        angles = [2 * math.pi * place / len(self.names) for place in range(len(self.names) + 1)]
        axes.set_theta_zero_location("N")
        axes.set_theta_direction(-1)
        handles = []
        for place, one in enumerate(self.data):
            marker = {"marker": MARKERS[SYMBOLS[place % len(SYMBOLS)]], "markersize": 0.4 * size}
            style = LINE_STYLES[DASHES[place % len(DASHES)]]
            handles.append(plot_series(axes, angles, [*one.y, *one.y[:1]], one, place, linestyle=style, **marker))
        axes.spines["polar"].set_color(COLORS["line"])
        axes.set_xticks(angles[:-1], [""] * len(self.names))
        low, high = self.span or (0, 100)
        axes.set_ylim(low, high)
        ticks = [tick for tick in plotting.round_values(low, high) if low < tick <= high]
        axes.set_yticks(ticks, [""] * len(ticks))
        for tick in ticks:
            at = (math.pi / len(self.names), tick)
            note(axes, f"{tick:g}{self.unit}", at, (0, 0), fontsize=0.8 * size, ha="center")
        for angle, name in zip(angles, self.names, strict=False):
            dx, dy = math.sin(angle), math.cos(angle)
            side = "center" if abs(dx) < 0.15 else "left" if dx > 0 else "right"
            text = short(name, min(14, beside / (size * LETTER)))
            note(axes, text, (angle, high), (0.7 * size * dx, 0.9 * size * dy), ha=side, color=COLORS["ink"])
        self.legend(drawing, handles, size)
        return drawing


def radar(names: Sequence[str], series: Sequence[Series], *, title: str, alt: str, **options: Any) -> Figure:
    """Return a radar chart of several series, with one direction per name; for the options see ``Radar``."""
    return Figure(title=title, alt=alt, plot=Radar(names=names, data=series, **options))
