"""The palette, and matplotlib figures as SVG for a page or as files for a paper.

Matplotlib is imported only when something is drawn. On a page every color is a CSS variable, so that one drawing serves
light and dark pages. Text remains text, and a drawing has no external references.
"""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from markupsafe import Markup

from classwise.reporting.formatting import plain, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1a1f26", "#e6e9ec"),
    "muted": ("#59636e", "#a3acb6"),
    "faint": ("#858f9a", "#7c8691"),
    "line": ("#e3e7eb", "#2b3138"),
    "wash": ("#f5f7f8", "#1c2025"),
    "natural": ("#d4dde6", "#35414d"),
    "attack": ("#3d5670", "#93b4d4"),
    "accent": ("#bd3a0c", "#ff9468"),
    "accent-light": ("#f4d5c6", "#5c3828"),
    "correct": ("#3d5671", "#547ea8"),
    "on-correct": ("#fffffe", "#ffffff"),
    "wrong": ("#d99821", "#c98a1b"),
    "on-wrong": ("#1a1f27", "#1a1f26"),
    "gray": ("#8a939d", "#8a939d"),
    "blue": ("#0072b2", "#3a9bd9"),
    "orange": ("#e69f00", "#e69f00"),
    "green": ("#009e73", "#1db98c"),
    "pink": ("#cc79a7", "#d98cb6"),
    "sky": ("#56b4e9", "#9fd8f7"),
    "vermilion": ("#d55e00", "#f07f2e"),
    "brown": ("#8c6d1f", "#b8963f"),
}
"""Name → color on a light and on a dark page. The categorical ones are Okabe and Ito's (2008)."""
COLORS = {name: light for name, (light, _) in PALETTE.items()}
MODEL_NAMES = ("gray", "blue", "orange", "green", "pink", "sky")
MODEL_COLORS = tuple(COLORS[name] for name in MODEL_NAMES)
"""Colors of the models of a comparison; the first is the baseline's."""
PAGE_SIZE, FILE_SIZE = 12.5, 9.0
"""Font sizes of pages (pixels) and files (points)."""
FILE_WIDTH = 468.0
"""Text width of a page in points (6.5 inches)."""
KINDS = ("svg", "pdf", "png")
LETTER = 0.56
"""Mean width of a character, relative to the font size."""
_NAMES = {light: name for name, light in COLORS.items()} | {"#000000": "ink"}

Draw = Callable[[float, float], "Figure"]
"""Draws at a width (pixels of a page or points of a file) with a font size."""


def style_sheet() -> str:
    """Return the palette as CSS variables; the dark values apply on dark screens, not in print."""
    light, dark = (";".join(f"--{name}:{pair[mode]}" for name, pair in PALETTE.items()) for mode in (0, 1))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


@contextmanager
def style(size: float) -> Iterator[None]:
    """Apply the style of all figures. Text is not parsed as math; missing glyphs cause no warning."""
    from matplotlib import rc_context

    look: Any = {
        "font.family": "sans-serif",
        "font.size": size,
        "text.color": COLORS["ink"],
        "text.parse_math": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.edgecolor": COLORS["faint"],
        "axes.labelcolor": COLORS["muted"],
        "axes.labelsize": size,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.bottom": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": COLORS["line"],
        "lines.linewidth": 0.15 * size,
        "xtick.color": COLORS["muted"],
        "ytick.color": COLORS["ink"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "classwise",
        "pdf.fonttype": 42,
    }
    with rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def new(
    width: float, height: float, margins: tuple[float, float, float, float], *, polar: bool = False
) -> tuple[Figure, Any]:
    """Return a figure and its axes; ``margins``: left, right, top and bottom."""
    from matplotlib.figure import Figure

    figure, (left, right, top, bottom) = Figure(figsize=(width / 72, height / 72), dpi=72), margins
    axes = figure.add_subplot(projection="polar" if polar else None)
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    return figure, axes


def inline(
    draw: Draw,
    alt: str,
    widths: tuple[float, ...],
    titles: Mapping[str, str],
    alternatives: Mapping[str, str],
) -> Markup:
    """Return an SVG drawing; narrow screens show the first of two ``widths``, other screens the second.

    ``titles``: tooltips by id.
    ``alternatives``: other texts by id, which the page shows instead if it is switched.
    """
    alt = printable(alt)
    names = ("narrow", "wide") if len(widths) > 1 else ("",)
    return Markup("").join(
        _inline(draw, alt, width, name, titles, alternatives) for width, name in zip(widths, names, strict=True)
    )


def save(figure: Figure, path: Any, kind: str) -> None:
    """Write one file; the same figure gives the same bytes."""
    settings: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
        "png": {"dpi": 300},
    }
    figure.savefig(path, format=kind, facecolor=COLORS["paper"], **settings[kind])


def add_box(
    axes: Axes, corner: tuple[float, float], width: float, height: float, color: str, *, gid: str, alpha: float = 1
) -> None:
    """Draw a rectangle; the limits of the axes stay as they are."""
    from matplotlib.patches import Rectangle

    box = Rectangle(corner, width, height, facecolor=color, alpha=alpha, linewidth=0, gid=gid)
    axes.add_artist(box)


def note(axes: Axes, text: str, at: Any, offset: tuple[float, float], transform: Any = "data", **look: Any) -> None:
    """Write a text at an offset, in the unit of the font size, from a place; in a muted color by default."""
    merged: Any = {"va": "center", "color": COLORS["muted"], "annotation_clip": False} | look
    axes.annotate(text, at, offset, transform, "offset points", **merged)


def round_ticks(axes: Axes) -> None:
    """Put the ticks of both axes at round numbers."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))


def round_values(low: float, high: float) -> list[float]:
    """Return about five round numbers between two values."""
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, high)]


def short(name: str, letters: float) -> str:
    """Return a name as one line of at most ``letters`` letters, without characters that XML forbids.

    >>> short("a very long name", 8)
    'a very …'
    """
    text, most = printable(plain(name)), max(3, int(letters))
    return text if len(text) <= most else text[: most - 1] + "…"


def extent(names: Any, size: float, most: float = 30) -> float:
    """Return the room that the longest of some names needs."""
    return size * LETTER * max((_letters(short(name, most)) for name in names), default=0.0)


def _letters(text: str) -> float:
    return sum(1.8 if unicodedata.east_asian_width(c) in "WF" else 1.0 for c in text)


_HEAD = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->| xmlns(:xlink)?=\"[^\"]*\"|xlink:(?=href)", re.DOTALL)
_UNUSED = re.compile(r"font-family: [^;]*;? ?|stroke-linejoin: miter;? ?|stroke-linecap: (square|butt);? ?")
_FONT = re.compile(r"font: (?:normal )*([\d.]+)px [^;]*")
_COLOR = re.compile(r"#[0-9a-f]{6}")
_DECIMALS = re.compile(r"(\d+\.\d)\d+")
_COMMAND = re.compile(r"\s*\b([MLCQz])\s*")


def _inline(
    draw: Draw, alt: str, width: float, shown: str, titles: Mapping[str, str], alternatives: Mapping[str, str]
) -> Markup:
    written = io.StringIO()
    with style(PAGE_SIZE):
        draw(width, PAGE_SIZE).savefig(written, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(_HEAD.sub("", written.getvalue()))
    mark = f"f{sha256(f'{alt}{shown}{written.getvalue()}'.encode()).hexdigest()[:8]}-"
    _simplify(root, mark, titles, alternatives)
    wide, high = (float(size) for size in root.attrib["viewBox"].split()[2:])
    body = "".join(ElementTree.tostring(child, encoding="unicode") for child in root)
    body = body.replace("<g />", "").replace("<defs />", "")
    sized = "" if shown else f";width:{wide:g}px"
    return Markup(
        f'<svg class="chart {shown}" role="img" aria-label="{escape(alt)}" viewBox="0 0 {wide:g} {high:g}" '
        f'style="max-width:{wide:g}px{sized}">{body}</svg>'
    )


def _simplify(element: Element, mark: str, titles: Mapping[str, str], alternatives: Mapping[str, str]) -> None:
    """Drop what a page does not need, use the colors and the font of the page, and add tooltips and alternatives."""
    attributes, own = element.attrib, element.attrib.pop("id", "")
    attributes.pop("clip-path", None)
    element.tail, element.text = None, element.text if element.tag == "text" else None
    if own in alternatives:
        other = SubElement(element, "text", element[0].attrib | {"class": "pct"})
        element[0].attrib["class"], other.text = "cnt", printable(alternatives[own])
    for child in list(element):
        if child.tag in ("metadata", "style", "clipPath"):
            element.remove(child)
        else:
            _simplify(child, mark, titles, alternatives)
    if own in titles:
        attributes["class"] = own.partition("--")[0]
        title = Element("title")
        title.text = printable(titles[own])
        element.insert(0, title)
    elif element.tag == "path" and own:
        attributes["id"] = mark + own
    for name in ("d", "x", "y", "transform"):
        if name in attributes:
            attributes[name] = _COMMAND.sub(r"\1", _DECIMALS.sub(r"\1", attributes[name])).strip()
    if attributes.get("href", "").startswith("#"):
        attributes["href"] = f"#{mark}{attributes['href'][1:]}"
    if "style" in attributes:
        look = _FONT.sub(r"font-size:\1px", _UNUSED.sub("", attributes["style"]))
        look = _COLOR.sub(lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0], look)
        attributes["style"] = look.replace("; ", ";").replace(": ", ":")
