"""Lines, and points with labels that do not collide."""

# K classes, C channels, H height, W width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from classwise.reporting import plotting
from classwise.reporting.figures.base import (
    LINE_STYLES,
    LONGEST,
    MARKERS,
    READABLE,
    Figure,
    Plot,
    Series,
    color_of,
    plot_series,
    to_floats,
)
from classwise.reporting.plotting import COLORS, extent, new, note, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Plot):
    """Curves, with a band between ``low`` and ``high``."""

    zero: bool = False
    marks: Mapping[str, float] | None = None
    """Named places on the x axis."""
    names: Sequence[str] | None = None
    """Names of the positions 0, 1, 2, ..."""
    height: float = 340

    def draw(self, width: float, size: float) -> Drawing:
        above = size * (0.8 + 1.7 * self.legend_rows(width, size) + (1.6 if self.marks else 0))
        names = self.names or ()
        slanted = bool(names) and extent(names, size) * len(names) > width
        below = size * 3.8 + (0.75 * extent(names, size, LONGEST) if slanted else 0)
        tall = self.height * size / plotting.PAGE_SIZE
        drawing, axes = new(width, tall + above + below, (size * 4.6, size * 1.6, above, below))
        handles = []
        for place, one in enumerate(self.data):
            at, color = one.places, color_of(one, place)
            if one.low is not None and one.high is not None:
                axes.fill_between(at, to_floats(one.low), to_floats(one.high), color=color, alpha=0.15, linewidth=0)
            marker = "o" if len(at) <= 40 else None
            look: Any = {"linestyle": LINE_STYLES[one.dash], "marker": marker, "markersize": 0.32 * size}
            handles.append(plot_series(axes, at, one.y, one, place, **look))
        plotting.round_ticks(axes)
        if self.zero:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        places = [where for one in self.data for where in one.x or ()]
        if names:
            shown = range(0, len(names), 1 + (len(names) - 1) // READABLE)
            slant: Any = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
            axes.set_xticks(list(shown), [short(names[place], LONGEST) for place in shown], **slant)
            axes.set_xlim(-0.5, len(names) - 0.5)
        elif places and all(isinstance(where, int) for where in places) and max(places) - min(places) < 12:
            axes.set_xticks(range(min(places), max(places) + 1))  # ticks at whole numbers only
        for name, where in (self.marks or {}).items():
            axes.axvline(where, color=COLORS["muted"], linewidth=0.09 * size, linestyle=":")
            note(axes, name, (where, 1), (0, 0.8 * size), axes.get_xaxis_transform(), ha="center")
        axes.set(xlabel=self.x, ylabel=self.y)
        self.legend(drawing, handles, size)
        return drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(Plot):
    """Points with intervals; names are placed where they cover neither each other nor points."""

    joined: Sequence[str] = ()
    """Names of the series whose points a line joins."""
    front: Sequence[tuple[float, float]] = ()
    """Places that a dashed line joins."""
    height: float = 380
    legended: bool = True

    def draw(self, width: float, size: float) -> Drawing:
        legended = self.legended and len({one.name for one in self.data}) <= READABLE
        above = size * (1.2 + (1.7 * self.legend_rows(width, size) if legended else 0))
        left, right, below = size * 4.6, size * 1.6, size * 3.8
        tall = self.height * size / plotting.PAGE_SIZE
        drawing, axes = new(width, tall + above + below, (left, right, above, below))
        total = sum(len(one.y) for one in self.data)
        diameter = size * (0.64 if total <= 200 else 0.48 if total <= 2000 else 0.32)
        handles: dict[str, Any] = {}
        for place, one in enumerate(self.data):
            color, x, y = color_of(one, place), to_floats(one.places), to_floats(one.y)
            soft: Any = {"color": color, "linewidth": 0.11 * size}
            if one.low is not None and one.high is not None:
                axes.vlines(x, to_floats(one.low), to_floats(one.high), **soft)
            if one.x_low is not None and one.x_high is not None:
                axes.hlines(y, to_floats(one.x_low), to_floats(one.x_high), **soft)
            marker = {"marker": MARKERS[one.symbol.removesuffix("-open")], "markersize": diameter}
            fill = "none" if one.symbol.endswith("-open") else color
            line = "-" if one.name in self.joined else ""
            drawn = plot_series(axes, x, y, one, place, linestyle=line, markerfacecolor=fill, **marker)
            handles.setdefault(one.name, drawn)
        if len(self.front) > 1:
            ahead = np.array(self.front)
            dashed: Any = {"color": COLORS["faint"], "linestyle": (0, (5, 4)), "linewidth": 0.09 * size}
            axes.plot(ahead[:, 0], ahead[:, 1], zorder=1, **dashed)
        axes.margins(0.08)
        plotting.round_ticks(axes)
        axes.set(xlabel=self.x, ylabel=self.y)
        self._name(axes, (left, below, width - left - right, tall), size)
        if legended:
            self.legend(drawing, list(handles.values()), size)
        return drawing

    def _name(self, axes: Axes, box: tuple[float, float, float, float], size: float) -> None:
        """Write the names of the points."""
        if max((len(one.y) for one in self.data), default=0) > READABLE:
            return
        (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
        left, bottom, width, height = box
        found = [
            (left + width * (x - x0) / (x1 - x0), bottom + height * (y - y0) / (y1 - y0), short(text, 18), x, y)
            for one in self.data
            for x, y, text in zip(one.places, one.y, one.text or (), strict=False)
            if x is not None and y is not None
        ]
        taken = [(x - 0.4 * size, y - 0.4 * size, x + 0.4 * size, y + 0.4 * size) for x, y, *_ in found]
        within = (left, bottom, left + width + size, bottom + height + size)
        for px, py, text, x, y in found:
            dx, dy, side = place_label(px, py, extent([text], size), size, taken, within)
            note(axes, text, (x, y), (dx, dy), ha=side, color=COLORS["ink"])


Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def place_label(
    x: float, y: float, length: float, size: float, taken: list[Box], within: Box
) -> tuple[float, float, str]:
    """Choose the place beside a point that covers least, the nearest of those; add its box to ``taken``."""

    def box(dx: float, dy: float, side: str) -> Box:
        start = x + dx - {"left": 0.0, "center": length / 2, "right": length}[side]
        return start, y + dy - 0.55 * size, start + length, y + dy + 0.55 * size

    def covered(one: Box) -> float:
        area = sum(
            max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
            * max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
            for other in taken
        )
        outside = max(0.0, within[0] - one[0]) + max(0.0, one[2] - within[2])
        return area + 4 * size * (outside + max(0.0, within[1] - one[1]) + max(0.0, one[3] - within[3]))

    near, step = 0.75 * size, 1.15 * size
    places = [
        (side * near, sign * (0.8 * size + k * step), "left" if side > 0 else "right")
        for k in range(7)
        for sign in (1, -1)
        for side in (1, -1)
    ]
    places[4:4] = [(0.0, step, "center"), (0.0, -step, "center")]
    best = min(places, key=lambda place: round(covered(box(*place)), 3))
    taken.append(box(*best))
    return best


def lines(series: Sequence[Series], *, title: str, alt: str, x: str, y: str, **options: Any) -> Figure:
    """Return curves; for the options see ``Lines``."""
    return Figure(title=title, alt=alt, plot=Lines(data=series, x=x, y=y, **options))


def points(series: Sequence[Series], *, title: str, alt: str, x: str, y: str, joined: Sequence[str] = ()) -> Figure:
    """Return points; a line joins those of the series named in ``joined``. Series of one name share a legend entry."""
    return Figure(title=title, alt=alt, plot=Points(data=series, x=x, y=y, joined=joined))
