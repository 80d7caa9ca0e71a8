"""Figures: titles, numbers, axes and a text alternative. They are drawn when a page or a file asks for them.

Every figure of a page, an analysis, a repair or a paper is one of these kinds: bars, lines, points, a heatmap (with it
every confusion matrix), a radar chart, or a gallery of images.
"""

# K classes, C channels, H height, W width

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from classwise.core.errors import InputError, unknown
from classwise.reporting import plotting
from classwise.reporting.estimates import Interval
from classwise.reporting.formatting import interval, number
from classwise.reporting.plotting import COLORS, LETTER, add_box, extent, new, note, short
from classwise.storage.files import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

FEW_COUNTS = 6
"""Largest count up to which each whole number has a grid line."""
SERIES_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D1F")
"""Default colors of series."""
INK, SOFT = COLORS["ink"], COLORS["muted"]
LONGEST = 30
"""Maximum length of a name on an axis, in characters."""
READABLE = 30
"""Maximum number of heatmap rows whose cells hold numbers, and of points with names."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
SMALL = 96
"""Images narrower than this many pixels are enlarged to this width, pixel by pixel."""
NARROW, WIDE = 340.0, 720.0
"""Widths of a figure on a phone and on a screen, in pixels."""
Values = Sequence[float | None]

_MARKERS = dict(zip(SYMBOLS, ("o", "s", "D", "^", "P", "X"), strict=True))
_STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values under one name, with intervals if there are any."""

    name: str
    y: Values
    x: Sequence[Any] | None = None
    """Positions; 0, 1, 2, ... by default."""
    low: Values | None = None
    high: Values | None = None
    x_low: Values | None = None
    x_high: Values | None = None
    """The interval of a position."""
    text: Sequence[str] | None = None
    """A name for each value."""
    color: str | None = None
    dash: str = "solid"
    symbol: str = "circle"
    """Marker of points; with the suffix ``-open`` it is not filled."""
    worst: frozenset[int] = frozenset()
    """Positions of the values to highlight."""

    @classmethod
    def of(cls, name: str, parts: Sequence[Interval], **options: Any) -> Series:
        """Return the values of some parts with their intervals."""
        values, low, high = ([getattr(part, field) for part in parts] for field in ("value", "low", "high"))
        return cls(name=name, y=values, low=low, high=high, **options)

    @property
    def places(self) -> list[Any]:
        """The positions."""
        return list(range(len(self.y))) if self.x is None else list(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Base class of all plots: series and axes."""

    data: Sequence[Series] = ()
    x: str = ""
    y: str = ""
    """Labels of the axes."""
    sizes: tuple[float, ...] = (NARROW, WIDE)
    """Widths for a page."""

    @property
    def widths(self) -> tuple[float, ...]:
        """Distinct widths for a page."""
        return tuple(dict.fromkeys(self.sizes))

    def draw(self, width: float, size: float) -> Drawing:
        """Draw at a width with a font size."""
        raise NotImplementedError

    def titles(self) -> Mapping[str, str]:
        """Tooltips by element id; by default one for each series."""
        return {f"line--{place}": one.name for place, one in enumerate(self.data)}

    def alternatives(self) -> Mapping[str, str]:
        """Alternative texts by element id; a page can switch between the two."""
        return {}

    def legend(self, drawing: Drawing, handles: Sequence[Any], size: float, margin: float = 0) -> None:
        """Put the legend above the axes."""
        names = [str(handle.get_label()) for handle in handles]
        if len(names) > 1:
            drawing.legend(
                handles=handles,
                labels=names,
                loc="upper left",
                bbox_to_anchor=(0, 1 - margin / (72 * drawing.get_figheight())),
                ncols=_columns(names, 72 * drawing.get_figwidth(), size),
                handlelength=1.4,
                columnspacing=1.2,
                borderpad=0,
                borderaxespad=0,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot or a gallery with its title and its text alternative."""

    title: str
    alt: str
    plot: Plot | Gallery

    @property
    def role(self) -> str:
        """The ARIA role: one image, or a group of images with alternatives of their own."""
        return "group" if isinstance(self.plot, Gallery) else "img"

    def html(self) -> Markup:
        """Return the figure for a page."""
        if isinstance(self.plot, Gallery):
            return self.plot.html()
        plot = self.plot
        return plotting.inline(plot.draw, self.alt, plot.widths, plot.titles(), plot.alternatives())

    def save(self, path: str | Path) -> None:
        """Write the plot to a file of the kind that its suffix names: svg, pdf or png."""
        path = Path(path)
        kind = path.suffix.removeprefix(".").lower()
        if kind not in plotting.KINDS:
            raise unknown("kind of figure", kind, plotting.KINDS)
        if isinstance(self.plot, Gallery):
            raise InputError("a gallery of images cannot be saved as a drawing: save the page instead")
        with plotting.style(plotting.FILE_SIZE), atomic(path) as partial:
            plotting.save(self.plot.draw(plotting.FILE_WIDTH, plotting.FILE_SIZE), partial, kind)

    def save_all(self, stem: Path, kinds: Iterable[str]) -> list[Path]:
        """Write the plot in several kinds; return the files."""
        files = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
        for file in files:
            self.save(file)
        return files

    def _repr_html_(self) -> str:
        if isinstance(self.plot, Gallery):
            return self.html()
        written = io.BytesIO()
        with plotting.style(plotting.PAGE_SIZE):
            plotting.save(self.plot.draw(self.plot.widths[-1], plotting.PAGE_SIZE), written, "svg")
        encoded = base64.b64encode(written.getvalue()).decode()
        return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(self.alt, encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image with its caption."""

    png: str
    """PNG in base 64, as from ``png``."""
    alt: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Images that belong together, with a heading and lines of text."""

    heading: str
    pictures: Sequence[Picture]
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Gallery:
    """Cards side by side, as many in a row as fit."""

    cards: Sequence[Card]

    def html(self) -> Markup:
        """Return the cards for a page; their texts are escaped."""
        return Markup('<div class="gallery">{}</div>').format(Markup().join(map(_card, self.cards)))


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
            f"bar--{number_}-{row}": f"{name}, {one.name}: {_with_interval(one, row)}"
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
        legend = [one.name for one in self.data] if len(self.data) > 1 else []
        above = size * (0.8 + 1.7 * _legend_rows(legend, width, size) + (1.6 if self.line else 0))
        below = size * 3.8
        beside = size * LETTER * ((5 if narrow else 15) if self.values else 2)
        margins = (extent(self.names, size, letters) + size, beside, above, below)
        drawing, axes = new(width, total * high + above + below, margins)
        rows, handles = self._rows(), []
        starts = np.zeros(len(self.names))
        for number_, one in enumerate(self.data):
            at, thick = self._position(number_, each)
            color = _color(one, number_)
            lengths = np.array([0.0 if value is None else value for value in one.y])
            handles.append(Rectangle((0, 0), 1, 1, color=color, label=_label(one.name)))
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                if one.y[row] is not None:
                    accent = COLORS["accent-light" if color == COLORS["natural"] else "accent"]
                    own = accent if self.mode == "overlaid" and row in one.worst else color
                    add_box(axes, (start, rows[row] + at - thick / 2), length, thick, own, gid=f"bar--{number_}-{row}")
            _whiskers(axes, one, np.add(rows, at), soft=self.mode == "overlaid" and number_ + 1 < len(self.data))
            if self.mode == "grouped" and one.worst:
                weakest = [row for row in sorted(one.worst) if one.y[row] is not None]
                dots: Any = {"markersize": 0.5 * size, "markeredgecolor": COLORS["paper"], "color": COLORS["accent"]}
                axes.plot(_floats(one.y[row] for row in weakest), [rows[row] + at for row in weakest], "o", **dots)
            if self.mode == "stacked":
                starts = starts + lengths
        self._write(axes, size, narrow, letters)
        low, most = self.span or _limits(
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
        legend = [one.name for one in self.data] if len(self.data) > 1 else []
        above = size * (0.8 + 1.7 * _legend_rows(legend, width, size) + (1.6 if self.marks else 0))
        names = self.names or ()
        slanted = bool(names) and extent(names, size) * len(names) > width
        below = size * 3.8 + (0.75 * extent(names, size, LONGEST) if slanted else 0)
        tall = self.height * size / plotting.PAGE_SIZE
        drawing, axes = new(width, tall + above + below, (size * 4.6, size * 1.6, above, below))
        handles = []
        for place, one in enumerate(self.data):
            at, color = one.places, _color(one, place)
            if one.low is not None and one.high is not None:
                axes.fill_between(at, _floats(one.low), _floats(one.high), color=color, alpha=0.15, linewidth=0)
            marker = "o" if len(at) <= 40 else None
            look: Any = {"linestyle": _STYLES[one.dash], "marker": marker, "markersize": 0.32 * size}
            handles.append(_plot(axes, at, one.y, one, place, **look))
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
        names = list(dict.fromkeys(one.name for one in self.data))
        legend = names if self.legended and 1 < len(names) <= READABLE else []
        above = size * (1.2 + 1.7 * _legend_rows(legend, width, size))
        left, right, below = size * 4.6, size * 1.6, size * 3.8
        tall = self.height * size / plotting.PAGE_SIZE
        drawing, axes = new(width, tall + above + below, (left, right, above, below))
        total = sum(len(one.y) for one in self.data)
        diameter = size * (0.64 if total <= 200 else 0.48 if total <= 2000 else 0.32)
        handles: dict[str, Any] = {}
        for place, one in enumerate(self.data):
            color, x, y = _color(one, place), _floats(one.places), _floats(one.y)
            soft: Any = {"color": color, "linewidth": 0.11 * size}
            if one.low is not None and one.high is not None:
                axes.vlines(x, _floats(one.low), _floats(one.high), **soft)
            if one.x_low is not None and one.x_high is not None:
                axes.hlines(y, _floats(one.x_low), _floats(one.x_high), **soft)
            marker = {"marker": _MARKERS[one.symbol.removesuffix("-open")], "markersize": diameter}
            fill = "none" if one.symbol.endswith("-open") else color
            line = "-" if one.name in self.joined else ""
            drawn = _plot(axes, x, y, one, place, linestyle=line, markerfacecolor=fill, **marker)
            handles.setdefault(one.name, drawn)
        if len(self.front) > 1:
            ahead = np.array(self.front)
            dashed: Any = {"color": COLORS["faint"], "linestyle": (0, (5, 4)), "linewidth": 0.09 * size}
            axes.plot(ahead[:, 0], ahead[:, 1], zorder=1, **dashed)
        axes.margins(0.08)
        plotting.round_ticks(axes)
        axes.set(xlabel=self.x, ylabel=self.y)
        self._name(axes, (left, below, width - left - right, tall), size)
        if legend:
            self.legend(drawing, [handles[name] for name in legend], size)
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


def _shared(one: Sequence[float], other: Sequence[float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Radar(Plot):
    """Radar chart: one direction per name; a series has a gap where a value is missing."""

    names: Sequence[str]
    unit: str = ""
    span: tuple[float, float] | None = None

    sizes: tuple[float, ...] = (NARROW, 600.0)

    def draw(self, width: float, size: float) -> Drawing:
        beside = min(extent(self.names, size, 14), 0.26 * width) + size
        above = size * (2.6 + 1.7 * _legend_rows([one.name for one in self.data], width, size))
        across = width - 2 * beside
        margins = (beside, beside, above, 2.6 * size)
        drawing, axes = new(width, across + above + 2.6 * size, margins, polar=True)
        angles = [2 * math.pi * place / len(self.names) for place in range(len(self.names) + 1)]
        axes.set_theta_zero_location("N")
        axes.set_theta_direction(-1)
        handles = []
        for place, one in enumerate(self.data):
            marker = {"marker": _MARKERS[SYMBOLS[place % len(SYMBOLS)]], "markersize": 0.4 * size}
            style = _STYLES[DASHES[place % len(DASHES)]]
            handles.append(_plot(axes, angles, [*one.y, *one.y[:1]], one, place, linestyle=style, **marker))
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


def lines(series: Sequence[Series], *, title: str, alt: str, x: str, y: str, **options: Any) -> Figure:
    """Return curves; for the options see ``Lines``."""
    return Figure(title=title, alt=alt, plot=Lines(data=series, x=x, y=y, **options))


def points(series: Sequence[Series], *, title: str, alt: str, x: str, y: str, joined: Sequence[str] = ()) -> Figure:
    """Return points; a line joins those of the series named in ``joined``. Series of one name share a legend entry."""
    return Figure(title=title, alt=alt, plot=Points(data=series, x=x, y=y, joined=joined))


def radar(names: Sequence[str], series: Sequence[Series], *, title: str, alt: str, **options: Any) -> Figure:
    """Return a radar chart of several series, with one direction per name; for the options see ``Radar``."""
    return Figure(title=title, alt=alt, plot=Radar(names=names, data=series, **options))


def gallery(cards: Sequence[Card], *, title: str, alt: str) -> Figure:
    """Return images in groups."""
    return Figure(title=title, alt=alt, plot=Gallery(cards))


def png(pixels: NDArray[Any], side: int | None = None) -> str:
    """Return an image (C, H, W) in [0, 1] as a PNG in base 64: RGB if C is 3, else the mean of the channels in gray.

    ``side``: a larger image is reduced to this width and height.
    """
    shades = np.asarray(pixels, dtype=np.float64)
    shades = np.moveaxis(shades, 0, -1) if len(shades) == 3 else shades.mean(0)
    image = Image.fromarray(np.round(255 * shades.clip(0, 1)).astype(np.uint8))
    if side is not None:
        image.thumbnail((side, side))
    written = io.BytesIO()
    image.save(written, "png")
    return base64.b64encode(written.getvalue()).decode()


def _card(card: Card) -> Markup:
    pictures = Markup().join(
        Markup('<figure><img{} src="data:image/png;base64,{}" alt="{}"><figcaption>{}</figcaption></figure>').format(
            Markup(' class="small"') if _width(one.png) <= SMALL else "", one.png, one.alt, one.caption
        )
        for one in card.pictures
    )
    lines = Markup().join(Markup("<p>{}</p>").format(line) for line in card.lines)
    return Markup("<div><h4>{}</h4><div>{}</div>{}</div>").format(card.heading, pictures, lines)


def _width(png: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        return image.width


def _plot(axes: Axes, x: Sequence[Any], y: Values, one: Series, place: int, **look: Any) -> Any:
    """Draw a series as a line, markers or both."""
    common: Any = {"color": _color(one, place), "linewidth": 0.15 * plotting.font_size(), "label": _label(one.name)}
    (line,) = axes.plot(x, _floats(y), gid=f"line--{place}", **(common | look))
    return line


def _color(one: Series, place: int) -> str:
    return (one.color or SERIES_COLORS[place % len(SERIES_COLORS)]).lower()


def _label(name: str) -> str:
    """A name for a legend; matplotlib leaves out those that begin with an underscore."""
    text = short(name, LONGEST)
    return f"\u200b{text}" if text.startswith("_") else text


def _floats(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _columns(names: Sequence[str], width: float, size: float) -> int:
    return max(1, int(width // (extent(names, size, LONGEST) + 3.4 * size)))


def _legend_rows(names: Sequence[str], width: float, size: float) -> int:
    unique = list(dict.fromkeys(names))
    return math.ceil(len(unique) / _columns(unique, width, size)) if len(unique) > 1 else 0


def _limits(values: Iterable[Any]) -> tuple[float, float]:
    known = [float(value) for value in values if value is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    room = 0.04 * (high - low) or 1.0
    return low - room if low < 0 else 0.0, high + room


def _with_interval(one: Series, row: int) -> str:
    bounds = interval(one.low[row], one.high[row]) if one.low is not None and one.high is not None else ""
    return f"{number(one.y[row])} ({bounds})" if bounds else number(one.y[row])


def _whiskers(axes: Axes, one: Series, rows: Any, *, soft: bool) -> None:
    if one.low is None or one.high is None:
        return
    size = plotting.font_size()
    low, high = _floats(one.low), _floats(one.high)
    if not soft:
        axes.hlines(rows, low, high, color=COLORS["paper"], linewidth=0.3 * size)
    axes.hlines(rows, low, high, color=COLORS["faint" if soft else "ink"], linewidth=(0.1 if soft else 0.12) * size)
