"""Figures in one look: what the axes are, which numbers, and a sentence for those who do not see them.

Plotly draws them, in a page with names and numbers under the pointer. Colours are Okabe and Ito's, which colour-blind
readers can tell apart, in an order that also differs in lightness; counts and shares are shades of one blue.
Galleries of images are figures too: plain HTML that brings its images with it.
"""

# K classes, C channels, H height, W width

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Plot

FEW_COUNTS = 6
"""Up to here every whole number gets a line of its own."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D1F")
"""Okabe and Ito 2008, its yellow darkened: it cannot be seen on white."""
INK, RULE, SOFT = "#1a1a1a", "#d0d0d0", "#767676"
SHADES = ((0.0, "#ffffff"), (0.15, "#d9e8f5"), (0.4, "#9cc4e4"), (0.7, "#3a82bd"), (1.0, "#08306b"))
LONGEST = 30
"""Letters of a name on an axis."""
READABLE = 30
"""Cells of a row up to which numbers are written into them, and names beside them all."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
SMALL = 96
"""Pixels in a row up to which an image is enlarged to this width, pixel by pixel."""
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing or a gallery, its title, and what it shows in words."""

    title: str
    alt: str
    plot: Plot | Gallery

    @property
    def role(self) -> str:
        """What it is to a screen reader: one image, or a group of them that have texts of their own."""
        return "group" if isinstance(self.plot, Gallery) else "img"

    def html(self) -> Markup:
        """The figure in a page, which has to bring plotly's script."""
        if isinstance(self.plot, Gallery):
            return self.plot.html()
        settings = {"displaylogo": False, "responsive": True}
        return Markup(self.plot.to_html(full_html=False, include_plotlyjs=False, config=settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image with a word or two under it."""

    png: str
    """As ``png`` writes it."""
    alt: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Images that belong together, between a line above and lines below."""

    heading: str
    pictures: Sequence[Picture]
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Gallery:
    """Cards side by side, as many in a row as fit."""

    cards: Sequence[Card]

    def html(self) -> Markup:
        """The cards in a page; whatever their texts hold is text."""
        return Markup('<div class="gallery">{}</div>').format(Markup().join(map(_card, self.cards)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values in a row under one name, with intervals where there are some."""

    name: str
    y: Values
    x: Sequence[Any] | None = None
    """Where they stand; 0, 1, 2, ... unless said."""
    low: Values | None = None
    high: Values | None = None
    text: Sequence[str] | None = None
    """A name for each value."""
    colour: str | None = None
    dash: str = "solid"
    symbol: str = "circle"
    """What a point is drawn as; those that end in ``-open`` are not filled."""


def heatmap(
    values: Sequence[Values],
    *,
    title: str,
    alt: str,
    names: Sequence[str],
    columns: Sequence[str] | None = None,
    x: str,
    y: str,
    unit: str = "",
    digits: int = 0,
    span: tuple[float, float] | None = None,
    groups: Sequence[int] = (),
) -> Figure:
    """A matrix in shades of blue, or around zero in orange and blue; ``groups`` are where lines divide it."""
    columns = names if columns is None else columns
    known = [value for row in values for value in row if value is not None]
    low, high = span or (min([0.0, *known]), max([0.0, *known]) or 1.0)
    around_zero = low < 0
    if around_zero:
        low, high = -max(-low, high), max(-low, high)
    few = max(len(names), len(columns)) <= READABLE
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in values] if few else np.array(values, dtype=np.float32),  # far faster for many
        "x": _distinct(columns),
        "y": _distinct(names),
        "zmin": low,
        "zmax": high,
        "colorscale": [[0, "#D55E00"], [0.5, "#ffffff"], [1, "#0072B2"]] if around_zero else [list(s) for s in SHADES],
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": f"{y} %{{y}}<br>{x} %{{x}}<br>%{{z:.{digits}f}} {unit}<extra></extra>",
        "xgap": 1 if few else 0,
        "ygap": 1 if few else 0,
        **({"texttemplate": f"%{{z:.{digits}f}}"} if few else {}),
    }
    side = max(360, min(900, 36 * len(names) + 160))
    plot = _plot([trace], x, y, height=side)
    plot.update_yaxes(autorange="reversed", showgrid=False, **_categories(names) | {"tickangle": 0})
    plot.update_xaxes(showgrid=False, **_categories(columns))
    ends, look = (-0.5, len(names) - 0.5), {"color": INK, "width": 1.5}
    borders = [border - 0.5 for border in groups]
    down = [{"type": "line", "x0": at, "x1": at, "y0": ends[0], "y1": ends[1], "line": look} for at in borders]
    across = [{"type": "line", "y0": at, "y1": at, "x0": ends[0], "x1": ends[1], "line": look} for at in borders]
    plot.update_layout(shapes=down + across)
    return Figure(title=title, alt=alt, plot=plot)


def off_diagonal(matrix: Sequence[Sequence[float]] | NDArray[Any]) -> list[list[float | None]]:
    """The rows of a square matrix with nothing on its diagonal, nor where there is no number.

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
    """Bars from zero, with intervals where there are some."""
    traces = [
        {
            "type": "bar",
            "name": _shown(one.name),
            "x": _distinct(names),
            "y": list(one.y),
            "marker": {"color": one.colour or COLOURS[place % len(COLOURS)]},
            "error_y": _errors(one),
        }
        for place, one in enumerate(series)
    ]
    plot = _plot(traces, x, y)
    plot.update_layout(barmode="stack" if stacked else "group", showlegend=len(series) > 1)
    plot.update_yaxes(rangemode="tozero")
    heights = [value for one in series for value in one.y if value is not None]
    if all(isinstance(value, int) for value in heights) and max(heights, default=0) <= FEW_COUNTS:
        plot.update_yaxes(dtick=1)  # there is no half of a class
    plot.update_xaxes(**_categories(names))
    return Figure(title=title, alt=alt, plot=plot)


def lines(
    series: Sequence[Series],
    *,
    title: str,
    alt: str,
    x: str,
    y: str,
    zero: bool = False,
    marks: Mapping[str, float] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Curves, with a band between ``low`` and ``high``; ``marks`` are named places on the x axis.

    With ``names`` the axis holds these, and the curves stand over their numbers.
    """
    traces: list[dict[str, Any]] = []
    for place, one in enumerate(series):
        at = list(range(len(one.y))) if one.x is None else list(one.x)
        colour = one.colour or COLOURS[place % len(COLOURS)]
        if one.low is not None and one.high is not None:
            traces.append(
                {
                    "type": "scatter",
                    "x": [*at, *reversed(at)],
                    "y": [*one.high, *reversed(one.low)],
                    "fill": "toself",
                    "fillcolor": _faint(colour),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "mode": "lines",
                }
            )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(at) > 40 else "lines+markers",
                "name": _shown(one.name),
                "x": at,
                "y": list(one.y),
                "line": {"color": colour, "dash": one.dash, "width": 2},
                "marker": {"size": 5},
            }
        )
    plot = _plot(traces, x, y)
    plot.update_layout(showlegend=len(series) > 1)
    if zero:
        plot.update_yaxes(rangemode="tozero")
    places = [where for one in series for where in one.x or ()]
    if places and all(isinstance(where, int) for where in places) and max(places) - min(places) < READABLE:
        plot.update_xaxes(dtick=1)  # there is nothing between whole numbers
    if names is not None:
        shown = range(0, len(names), 1 + (len(names) - 1) // READABLE)
        texts = _distinct(names)
        plot.update_xaxes(tickvals=list(shown), ticktext=[texts[place] for place in shown])
        plot.update_xaxes(range=[-0.5, len(names) - 0.5], zeroline=False, tickangle=_categories(names)["tickangle"])
    for name, where in (marks or {}).items():
        plot.add_vline(x=where, line={"color": SOFT, "dash": "dot", "width": 1}, annotation={"text": name})
    return Figure(title=title, alt=alt, plot=plot)


def points(series: Sequence[Series], *, title: str, alt: str, x: str, y: str, joined: Sequence[str] = ()) -> Figure:
    """Named points; those of the series in ``joined`` are joined by a line. Series of one name share a legend entry."""
    most, total = max((len(one.y) for one in series), default=0), sum(len(one.y) for one in series)
    traces = [
        {
            "type": "scatter",
            "mode": "+".join(
                (["lines"] if one.name in joined else [])
                + ["markers"]
                + (["text"] if one.text and most <= READABLE else [])
            ),
            "name": _shown(one.name),
            "x": list(one.x or range(len(one.y))),
            "y": list(one.y),
            "text": [_shown(text) for text in one.text or []],
            "textposition": "top center" if one.low is None else "middle right",
            "cliponaxis": False,
            "textfont": {"size": 11},
            "error_y": _errors(one),
            "legendgroup": one.name,
            "showlegend": one.name not in [other.name for other in series[:place]],
            "marker": {
                "color": one.colour or COLOURS[place % len(COLOURS)],
                "size": 8 if total <= 200 else 6 if total <= 2000 else 4,
                "symbol": one.symbol,
            },
            "line": {"width": 1.5, "color": one.colour or COLOURS[place % len(COLOURS)]},
        }
        for place, one in enumerate(series)
    ]
    plot = _plot(traces, x, y)
    plot.update_layout(showlegend=1 < len({one.name for one in series}) <= READABLE, legend_itemsizing="constant")
    return Figure(title=title, alt=alt, plot=plot)


def radar(
    names: Sequence[str],
    series: Sequence[Series],
    *,
    title: str,
    alt: str,
    unit: str = "",
    span: tuple[float, float] | None = None,
) -> Figure:
    """Series around one centre, with a direction for every name; they stay open where a value is missing."""
    around = _distinct(names)
    traces = []
    for place, one in enumerate(series):
        colour = one.colour or COLOURS[place % len(COLOURS)]
        ends = list(zip(one.low or [], one.high or [], strict=True))
        traces.append(
            {
                "type": "scatterpolar",
                "mode": "lines+markers",
                "name": _shown(one.name),
                "theta": [*around, *around[:1]],
                "r": [*one.y, *one.y[:1]],
                "customdata": [*ends, *ends[:1]],
                "line": {"color": colour, "dash": DASHES[place % len(DASHES)], "width": 2},
                "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7},
                "hovertemplate": f"%{{theta}}<br>%{{r:.1f}}{unit}"
                + (" [%{customdata[0]:.1f}, %{customdata[1]:.1f}]" if ends else ""),
            }
        )
    plot = _plot(traces, "", "", height=600)
    line, between = {"gridcolor": RULE, "linecolor": RULE}, 90 - 180 / len(names)
    plot.update_layout(
        showlegend=len(series) > 1,
        margin={"l": 90, "r": 90, "t": 90, "b": 50},
        legend={"y": 1.1},
        polar={
            "bgcolor": "#ffffff",
            # The numbers stand between two directions, where no value is.
            "radialaxis": {
                **line,
                "range": span,
                "angle": between,
                "tickangle": between,
                "ticksuffix": unit,
                "nticks": 6,
            },
            "angularaxis": {**line, "type": "category", "rotation": 90, "direction": "clockwise"},
        },
    )
    return Figure(title=title, alt=alt, plot=plot)


def gallery(cards: Sequence[Card], *, title: str, alt: str) -> Figure:
    """Images in groups."""
    return Figure(title=title, alt=alt, plot=Gallery(cards))


def png(pixels: NDArray[Any], side: int | None = None) -> str:
    """An image (C, H, W) in [0, 1] as a PNG in base 64: in colour if C is 3, else the grey of its channels' mean.

    ``side``: an image that is larger is made smaller.
    """
    shades = np.asarray(pixels, dtype=np.float64)
    shades = np.moveaxis(shades, 0, -1) if len(shades) == 3 else shades.mean(0)
    image = Image.fromarray(np.round(255 * shades.clip(0, 1)).astype(np.uint8))
    if side is not None:
        image.thumbnail((side, side))
    written = io.BytesIO()
    image.save(written, "png")
    return base64.b64encode(written.getvalue()).decode()


def script() -> str:
    """Plotly's script, for pages without a network."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


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


def _plot(traces: Sequence[Mapping[str, Any]], x: str, y: str, height: int = 420) -> Plot:
    from plotly.graph_objects import Figure as Plot

    plot = Plot(data=[dict(trace) for trace in traces])
    axis = {"gridcolor": RULE, "linecolor": SOFT, "automargin": True, "ticks": "outside", "tickcolor": RULE}
    plot.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        xaxis={**axis, "title": {"text": x}},
        yaxis={**axis, "title": {"text": y}},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel={"font": {"family": "system-ui, sans-serif"}},
    )
    return plot


def _categories(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names: numbers are names too, and up to a number of them none is left out."""
    slanted = sum(map(len, names)) > 80
    return {"type": "category", "dtick": 1 if len(names) <= READABLE else None, "tickangle": -45 if slanted else 0}


def _errors(one: Series) -> dict[str, Any] | None:
    if one.low is None or one.high is None:
        return None
    up = [None if v is None or h is None else h - v for v, h in zip(one.y, one.high, strict=True)]
    down = [None if v is None or low is None else v - low for v, low in zip(one.y, one.low, strict=True)]
    return {"type": "data", "array": up, "arrayminus": down, "color": INK, "thickness": 1.2, "width": 3}


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _distinct(names: Sequence[str]) -> list[str]:
    """Names as plotly shows them: as text, and two of one name apart."""
    seen: dict[str, int] = {}
    out = []
    for name in map(_shown, names):
        seen[name] = seen.get(name, 0) + 1
        out.append(name + "\u200b" * (seen[name] - 1))
    return out


def _shown(name: str) -> str:
    """A name on an axis: cut where it is long, and as text, for plotly reads a little HTML in it."""
    name = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
