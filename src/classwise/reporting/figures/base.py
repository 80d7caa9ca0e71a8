"""What every kind of figure shares: series, plots, and the figure with its title and text alternative."""

# K classes, C channels, H height, W width

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from classwise.core.errors import InputError, unknown
from classwise.reporting import plotting
from classwise.reporting.estimates import Interval
from classwise.reporting.figures.gallery import Card, Gallery
from classwise.reporting.plotting import COLORS, extent, short
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
NARROW, WIDE = 340.0, 720.0
"""Widths of a figure on a phone and on a screen, in pixels."""
Values = Sequence[float | None]

MARKERS = dict(zip(SYMBOLS, ("o", "s", "D", "^", "P", "X"), strict=True))
LINE_STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))


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

    def legend_columns(self, width: float, size: float) -> int:
        """Number of columns of the legend."""
        return max(1, int(width // (extent([one.name for one in self.data], size, LONGEST) + 3.4 * size)))

    def legend_rows(self, width: float, size: float) -> int:
        """Number of rows of the legend; 0 without one."""
        names = {one.name for one in self.data}
        return math.ceil(len(names) / self.legend_columns(width, size)) if len(names) > 1 else 0

    def legend(self, drawing: Drawing, handles: Sequence[Any], size: float) -> None:
        """Put the legend above the axes."""
        if len(handles) > 1:
            drawing.legend(
                handles=handles,
                labels=[str(handle.get_label()) for handle in handles],
                loc="upper left",
                bbox_to_anchor=(0, 1),
                ncols=self.legend_columns(72 * drawing.get_figwidth(), size),
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

    def _repr_html_(self) -> str:
        if isinstance(self.plot, Gallery):
            return self.html()
        written = io.BytesIO()
        with plotting.style(plotting.PAGE_SIZE):
            plotting.save(self.plot.draw(self.plot.widths[-1], plotting.PAGE_SIZE), written, "svg")
        encoded = base64.b64encode(written.getvalue()).decode()
        return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(self.alt, encoded)


def gallery(cards: Sequence[Card], *, title: str, alt: str) -> Figure:
    """Return images in groups."""
    return Figure(title=title, alt=alt, plot=Gallery(cards))


def plot_series(axes: Axes, x: Sequence[Any], y: Values, one: Series, place: int, **look: Any) -> Any:
    """Draw a series as a line, markers or both."""
    named: Any = {"gid": f"line--{place}", "color": color_of(one, place), "label": axis_label(one.name)}
    return axes.plot(x, to_floats(y), **named, **look)[0]


def color_of(one: Series, place: int) -> str:
    return (one.color or SERIES_COLORS[place % len(SERIES_COLORS)]).lower()


def axis_label(name: str) -> str:
    """A name for a legend; matplotlib leaves out those that begin with an underscore."""
    text = short(name, LONGEST)
    return f"\u200b{text}" if text.startswith("_") else text


def to_floats(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def axis_limits(values: Iterable[Any]) -> tuple[float, float]:
    known = [float(value) for value in values if value is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    room = 0.04 * (high - low) or 1.0
    return low - room if low < 0 else 0.0, high + room
