"""Bars by class, with intervals."""

# K classes, C channels, H height, W width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from classwise.reporting.figures.base import (
    FEW_COUNTS,
    Figure,
    Plot,
    Series,
    axis_label,
    axis_limits,
    color_of,
    to_floats,
)
from classwise.reporting.formatting import interval, number
from classwise.reporting.plotting import COLORS, LETTER, add_box, extent, new, note, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Plot):
    """Horizontal bars from zero: side by side, stacked, or overlaid (each narrower than the one before)."""

    names: Sequence[str]
    mode: str = "grouped"
    values: bool = False
    """Whether the values of the last series are printed at the end of each row."""
    span: tuple[float, float] | None = None
    line: tuple[str, float] | None = None
    """A vertical line with its label."""
    gap: tuple[int, str] | None = None
    """The row before which some are omitted, and the text shown there."""

    def _rows(self) -> list[float]:
        place, _ = self.gap or (len(self.names), "")
        return [row + (row >= place) for row in range(len(self.names))]

    def titles(self) -> Mapping[str, str]:
        return {
            f"bar--{number_}-{row}": f"{name}, {one.name}: {_value_text(one, row)}"
            for number_, one in enumerate(self.data)
            for row, name in enumerate(self.names)
        }

    def draw(self, width: float, size: float) -> Drawing:
        from matplotlib.patches import Rectangle

        narrow = width < 400
        letters = 12 if narrow else 24
        each = len(self.data) if self.mode == "grouped" else 1
        high = size * (0.75 * each + 0.95 if each > 1 else 2.1)
        total = len(self.names) + (self.gap is not None)
        above = size * (0.8 + 1.7 * self.legend_rows(width, size) + (1.6 if self.line else 0))
        below = size * 3.8
        beside = size * LETTER * ((5 if narrow else 15) if self.values else 2)
        margins = (extent(self.names, size, letters) + size, beside, above, below)
        drawing, axes = new(width, total * high + above + below, margins)
        rows, handles = self._rows(), []
        starts = np.zeros(len(self.names))
        for number_, one in enumerate(self.data):
            at, thick = self._position(number_, each)
            color = color_of(one, number_)
            lengths = np.array([0.0 if value is None else value for value in one.y])
            handles.append(Rectangle((0, 0), 1, 1, color=color, label=axis_label(one.name)))
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                if one.y[row] is not None:
                    accent = COLORS["accent-light" if color == COLORS["natural"] else "accent"]
                    own = accent if self.mode == "overlaid" and row in one.worst else color
                    add_box(axes, (start, rows[row] + at - thick / 2), length, thick, own, gid=f"bar--{number_}-{row}")
            _draw_whiskers(
                axes, one, np.add(rows, at), size, soft=self.mode == "overlaid" and number_ + 1 < len(self.data)
            )
            if self.mode == "grouped" and one.worst:
                weakest = [row for row in sorted(one.worst) if one.y[row] is not None]
                dots: Any = {"markersize": 0.5 * size, "markeredgecolor": COLORS["paper"], "color": COLORS["accent"]}
                axes.plot(to_floats(one.y[row] for row in weakest), [rows[row] + at for row in weakest], "o", **dots)
            if self.mode == "stacked":
                starts = starts + lengths
        self._write(axes, size, narrow, letters)
        low, most = self.span or axis_limits(
            [v for one in self.data for v in (*one.y, *(one.high or ()), *(one.low or ()))]
        )
        most = max(most, float(starts.max(initial=0)))
        axes.set_xlim(low, most)
        axes.set_ylim(total - 0.4, -0.6)
        if low < 0:  # names are at the left, not at zero
            axes.spines["left"].set_visible(False)
            axes.axvline(0, color=COLORS["faint"], linewidth=0.07 * size)
        counts = [value for one in self.data for value in one.y if value is not None]
        if all(isinstance(value, int) for value in counts) and max(counts, default=0) <= FEW_COUNTS:
            axes.set_xticks(range(int(most) + 1))  # no ticks at fractions of a count
        axes.set_xlabel(self.y)
        axes.grid(axis="y", visible=False)
        self.legend(drawing, handles, size)
        return drawing

    def _position(self, number_: int, each: int) -> tuple[float, float]:
        if self.mode == "overlaid":
            return 0.0, (0.68, 0.4)[number_] if len(self.data) > 1 else 0.5
        if each == 1:
            return 0.0, 0.62
        thick = 0.8 / each
        return (number_ - (each - 1) / 2) * thick, 0.92 * thick

    def _write(self, axes: Axes, size: float, narrow: bool, letters: int) -> None:
        rows, last = self._rows(), self.data[-1]
        axes.set_yticks(rows, [short(name, letters) for name in self.names])
        for row, tick in enumerate(axes.get_yticklabels()):
            if self.mode == "overlaid" and row in last.worst:
                tick.set(color=COLORS["accent"], fontweight="bold")
        right: Any = axes.get_yaxis_transform()
        for row, place in enumerate(rows):
            if all(one.y[row] is None for one in self.data):
                axes.text(0, place, " no examples", va="center", color=COLORS["muted"], fontsize=0.95 * size)
            elif self.values:
                low = row in last.worst
                bold: Any = {"color": COLORS["accent"], "fontweight": "bold"} if low else {"color": COLORS["ink"]}
                note(axes, number(last.y[row]), (1, place), (3.2 * size, 0), right, ha="right", **bold)
                if not narrow and last.low is not None and last.high is not None:
                    bounds = interval(last.low[row], last.high[row])
                    note(axes, bounds, (1, place), (8.3 * size, 0), right, ha="right", fontsize=0.9 * size)
        if self.line is not None:
            label, at = self.line
            axes.axvline(at, color=COLORS["ink"], linewidth=0.09 * size, linestyle=(0, (2, 3)))
            side = "right" if at > 70 else "left" if at < 30 else "center"
            note(axes, label, (at, 1), (0, 0.8 * size), axes.get_xaxis_transform(), ha=side, fontsize=0.95 * size)
        if self.gap is not None:
            place, label = self.gap
            axes.text(0, place, f" {label}", va="center", color=COLORS["muted"], fontsize=0.95 * size)


def _value_text(one: Series, row: int) -> str:
    bounds = interval(one.low[row], one.high[row]) if one.low is not None and one.high is not None else ""
    return f"{number(one.y[row])} ({bounds})" if bounds else number(one.y[row])


def _draw_whiskers(axes: Axes, one: Series, rows: Any, size: float, *, soft: bool) -> None:
    if one.low is None or one.high is None:
        return
    low, high = to_floats(one.low), to_floats(one.high)
    if not soft:
        axes.hlines(rows, low, high, color=COLORS["paper"], linewidth=0.3 * size)
    axes.hlines(rows, low, high, color=COLORS["faint" if soft else "ink"], linewidth=(0.1 if soft else 0.12) * size)


def bars(
    names: Sequence[str],
    series: Sequence[Series],
    *,
    title: str,
    alt: str,
    x: str = "class",
    y: str,
    stacked: bool = False,
) -> Figure:
    """Return bars from zero; ``x`` is what the names are, ``y`` the axis of the values."""
    mode = "stacked" if stacked else "grouped"
    return Figure(title=title, alt=alt, plot=Bars(names=names, data=series, x=x, y=y, mode=mode))
