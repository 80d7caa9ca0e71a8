"""Heatmaps, and with them every confusion matrix."""

# K classes, C channels, H height, W width

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from classwise.reporting import plotting
from classwise.reporting.figures.base import READABLE, WIDE, Figure, Plot, Values
from classwise.reporting.plotting import COLORS, LETTER, add_box, extent, new, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Plot):
    """A matrix: shades of blue, with orange for what is below zero or, in a confusion matrix, off the diagonal."""

    z: Sequence[Values]
    names: Sequence[str]
    columns: Sequence[str]
    unit: str = ""
    digits: int = 0
    span: tuple[float, float] | None = None
    groups: Sequence[int] = ()
    """Rows and columns before which a line divides the matrix."""
    confusion: bool = False
    texts: Sequence[Sequence[str]] | None = None
    others: Sequence[Sequence[str]] | None = None
    """Texts of the cells, and their alternatives when the page is switched."""
    tips: Sequence[Sequence[str]] | None = None

    @property
    def widths(self) -> tuple[float, ...]:
        """The width that the columns need; a phone scrolls."""
        room = extent(self.names, plotting.PAGE_SIZE, 20 if self._few() else 12) + 30
        few = self._few()
        return (min(WIDE, room + (52 if few else 9) * len(self.columns) + (0 if few else 60)),)

    def _few(self) -> bool:
        return max(len(self.names), len(self.columns)) <= READABLE

    def limits(self) -> tuple[float, float]:
        """The values of the lightest and the darkest cell; around zero if some are negative."""
        known = [value for row in self.z for value in row if value is not None]
        low, high = self.span or (min([0.0, *known]), max([0.0, *known]) or 1.0)
        return (-max(-low, high), max(-low, high)) if low < 0 else (low, high)

    def titles(self) -> Mapping[str, str]:
        if not self._few():
            return {}
        return {
            f"cell--{i}-{j}": self.tips[i][j]
            if self.tips is not None
            else f"{self.y} {self.names[i]}, {self.x} {self.columns[j]}: {value:.{self.digits}f} {self.unit}"
            for i, row in enumerate(self.z)
            for j, value in enumerate(row)
            if value is not None
        }

    def alternatives(self) -> Mapping[str, str]:
        if self.others is None or not self._few():
            return {}
        return {f"text--{i}-{j}": text for i, row in enumerate(self.others) for j, text in enumerate(row)}

    def draw(self, width: float, size: float) -> Drawing:
        few, n, m = self._few(), len(self.names), len(self.columns)
        letters = 20 if few else 12
        left = extent(self.names, size, letters) + size
        room = (width - left - size) / m
        slanted = extent(self.columns, size, 16) > room - 0.4 * size
        above = size * 1.8 + (0.75 * extent(self.columns, size, 16) + size * 0.5 if slanted else size * 0.6)
        high = (size * 2.2 if few else min(room, size * 1.7)) * n
        drawing, axes = new(width, high + above + 2.2 * size, (left, size, above, 2.2 * size))
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        if few:
            self._cells(axes, size)
        else:
            self._image(axes)
        for at in self.groups:
            for line in (axes.axhline, axes.axvline):
                line(at - 0.5, color=COLORS["ink"], linewidth=0.11 * size)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        slant: Any = {"rotation": 45, "ha": "left", "rotation_mode": "anchor"} if slanted else {}
        every = 1 if few else max(1, math.ceil(1.3 * size / room))
        columns, rows = range(0, m, every), range(0, n, 1 if few else max(1, math.ceil(1.3 * size * n / high)))
        axes.set_xticks(list(columns), [short(self.columns[j], 16) for j in columns], color=COLORS["ink"], **slant)
        axes.set_yticks(list(rows), [short(self.names[i], letters) for i in rows])
        axes.set_xlim(-0.5, m - 0.5)
        axes.set_ylim(n - 0.5, -0.5)
        low, most = self.limits()
        scale = f"{self.y} in rows, {self.x} in columns" if self.x != self.y else ""
        range_ = "" if self.confusion else f"{low:.{self.digits}f} (light) to {most:.{self.digits}f} {self.unit} (dark)"
        if low < 0:
            range_ = f"{low:.{self.digits}f} (orange) to {most:.{self.digits}f} {self.unit} (blue)"
        text = "; ".join(part for part in (scale, range_) if part)
        start = left / width if len(text) * LETTER * size < width - left else 0
        foot = 0.6 * size / (72 * drawing.get_figheight())
        drawing.text(start, foot, text, color=COLORS["muted"], fontsize=0.95 * size)
        return drawing

    def _shade(self, i: int, j: int, limits: tuple[float, float]) -> tuple[str, float]:
        """The color of a cell and its opacity."""
        value, (low, high) = self.z[i][j], limits
        if value is None:
            return "paper", 0.0
        if low < 0:
            return ("wrong" if value < 0 else "correct"), min(1.0, abs(value) / high)
        strength = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
        if self.confusion:  # nonlinear, so that a share of 2% is still visible
            return ("correct" if i == j else "wrong"), strength**0.7
        return "correct", strength

    def _cells(self, axes: Axes, size: float) -> None:
        limits = self.limits()
        for i, row in enumerate(self.z):
            if all(value is None for value in row):
                axes.text(-0.4, i, "no examples", va="center", color=COLORS["muted"], fontsize=0.95 * size)
            for j, value in enumerate(row):
                if value is None:
                    continue
                name, strength = self._shade(i, j, limits)
                if strength > 0:
                    corner = (j - 0.48, i - 0.47)
                    add_box(axes, corner, 0.96, 0.94, COLORS[name], alpha=round(strength, 2), gid=f"cell--{i}-{j}")
                color = COLORS[f"on-{name}" if strength > 0.6 else "ink" if strength > 0 else "faint"]
                text = f"{value:.{self.digits}f}" if self.texts is None else self.texts[i][j]
                weight = "bold" if self.confusion and i == j else "normal"
                look: Any = {"ha": "center", "va": "center", "fontsize": 0.95 * size, "fontweight": weight}
                axes.text(j, i, text, color=color, gid=f"text--{i}-{j}", **look)

    def _image(self, axes: Axes) -> None:
        from matplotlib.colors import to_rgba

        limits = self.limits()
        colors = {name: to_rgba(COLORS[name]) for name in ("paper", "correct", "wrong")}
        pixels = np.zeros((len(self.names), len(self.columns), 4))
        for i in range(len(self.names)):
            for j in range(len(self.columns)):
                name, strength = self._shade(i, j, limits)
                pixels[i, j] = (*colors[name][:3], strength)
        axes.imshow(pixels, interpolation="none", aspect="auto")


def heatmap(values: Sequence[Values], *, title: str, alt: str, names: Sequence[str], **options: Any) -> Figure:
    """Return a matrix in shades of blue, or around zero in orange and blue; for the options see ``Heatmap``."""
    options["columns"] = options.get("columns") or names
    return Figure(title=title, alt=alt, plot=Heatmap(z=values, names=names, **options))


def off_diagonal(matrix: Sequence[Sequence[float]] | NDArray[Any]) -> list[list[float | None]]:
    """Return the rows of a square matrix without its diagonal and without NaN.

    >>> off_diagonal([[5, 1], [2, 7]])
    [[None, 1.0], [2.0, None]]
    """
    return [
        [None if i == j or value != value else float(value) for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]
