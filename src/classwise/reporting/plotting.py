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
MODEL_COLORS = tuple(COLORS[name] for name in ("gray", "blue", "orange", "green", "pink", "sky"))
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
    titles: Mapping[str, str] | None = None,
    alternatives: Mapping[str, str] | None = None,
) -> Markup:
    """Return a drawing for a page.

    Of two ``widths``, phones show the first and other screens the second. ``titles``: tooltips by id.
    ``alternatives``: other texts by id, which the page shows instead if it is switched.
    """
    alt = printable(alt)
    names = ("narrow", "wide") if len(widths) > 1 else ("",)
    return Markup("").join(
        _inline(draw, alt, width, name, titles or {}, alternatives or {})
        for width, name in zip(widths, names, strict=True)
    )


def font_size() -> float:
    """Return the font size of the drawing in progress."""
    from matplotlib import rcParams

    return float(rcParams["font.size"])


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
    text = "".join("\N{REPLACEMENT CHARACTER}" if c in "\ufffe\uffff" else c for c in plain(name))
    most = max(3, int(letters))
    return text if len(text) <= most else text[: most - 1] + "…"


def extent(names: Any, size: float, most: float = 30) -> float:
    """Return the room that the longest of some names needs."""
    return size * LETTER * max((_letters(short(name, most)) for name in names), default=0.0)


def _letters(text: str) -> float:
    return sum(1.8 if unicodedata.east_asian_width(c) in "WF" else 1.0 for c in text)


_DROPPED = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"
    r'|<defs>\s*(<clipPath.*?</clipPath>\s*)+</defs>| clip-path="[^"]*"| transform="rotate\(-?0 [^)]*\)"'
    r'| xmlns(:xlink)?="[^"]*"| version="1.1"|; stroke-linejoin: miter|; stroke-linecap: (square|butt)',
    re.DOTALL,
)
_FONT = re.compile(r'style="font: (?:normal )*([\d.]+)px [^;"]*')
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_COLOR = re.compile(r"#[0-9a-f]{6}")
_COMMAND = re.compile(r" ?\b([MLCQz]) ?")
_DECIMALS = re.compile(r"(\d+\.\d)\d+")


def _inline(
    draw: Draw, alt: str, width: float, shown: str, titles: Mapping[str, str], alternatives: Mapping[str, str]
) -> Markup:
    written = io.StringIO()
    with style(PAGE_SIZE):
        draw(width, PAGE_SIZE).savefig(written, format="svg", metadata={"Date": None})
    svg = _DROPPED.sub("", written.getvalue())
    head, body = re.split(r"(?<=>)", svg.lstrip(), maxsplit=1)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    assert box is not None
    images: list[str] = []

    def keep(found: re.Match[str]) -> str:
        images.append(found[0])
        return f"\ue000{len(images) - 1}\ue001"

    body = re.sub(r'"data:image/png;base64,[^"]*"', keep, body)
    texts = re.split(r"(<text\b[^>]*>[^<]*</text>|<[^>]*>)", body)
    body = "".join(_element(part) if part.startswith("<") else part.strip() for part in texts)
    body = _with_ids(body, titles, alternatives, alt + shown)
    body = re.sub("\ue000(\\d+)\ue001", lambda found: images[int(found[1])], body)
    sized = "" if shown else f";width:{float(box[1]):g}px"
    return Markup(
        f'<svg class="chart {shown}" role="img" aria-label="{escape(alt)}" '
        f'viewBox="0 0 {float(box[1]):g} {float(box[2]):g}" style="max-width:{float(box[1]):g}px{sized}">{body}'
    )


def _element(tag: str) -> str:
    """A tag in fewer bytes, its colors as variables, its font that of the page."""
    if tag.startswith("</"):
        return tag
    head, text = re.match(r"(<[^>]*>)(.*)", tag, re.DOTALL).groups()  # type: ignore[union-attr]
    head = " ".join(head.split())
    head = _FONT.sub(r'style="font-size:\1px', head)
    head = _FONT_FAMILY.sub("", head)
    head = _COLOR.sub(lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0], head)
    head = _COMMAND.sub(r"\1", _DECIMALS.sub(r"\1", head)).replace("; ", ";").replace(": ", ":").replace('" />', '"/>')
    return head + text


def _with_ids(body: str, titles: Mapping[str, str], alternatives: Mapping[str, str], seed: str) -> str:
    """Drop the ids, or make them unique on the page if something refers to them; our own become classes."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', body))
    mark = f"f{sha256(f'{seed}{body}'.encode()).hexdigest()[:8]}-"

    def replaced(found: re.Match[str]) -> str:
        own = found[1]
        if own in titles:
            return f'<g class="{own.partition("--")[0]}"><title>{escape(printable(titles[own]))}</title>'
        return f'<g id="{mark}{own}">' if own in used else "<g>"

    def switched(found: re.Match[str]) -> str:
        text, other = found[2], alternatives.get(found[1])
        if other is None:
            return text
        first, second = (text.replace("<text", f'<text class="{kind}"', 1) for kind in ("cnt", "pct"))
        return first + _TEXT.sub(lambda _: f">{escape(other)}<", second, count=1)

    body = re.sub(r'<g id="([^"]*)">(<text\b[^>]*>[^<]*</text>)</g>', switched, body)
    body = re.sub(r'<g id="([^"]*)">', replaced, body)
    for name in used:
        body = body.replace(f'"#{name}"', f'"#{mark}{name}"').replace(f'<path id="{name}"', f'<path id="{mark}{name}"')
    body = re.sub(r'<path d="[^"]*" style="fill:none"/>|<g>?</g>|<g id="\w+"/>', "", body)
    for _ in range(3):  # groups of one element, and of none
        body = re.sub(r"<g>(<(?:path|use|image)\b[^>]*/>|<text\b[^>]*>[^<]*</text>|)</g>", r"\1", body)
    return body


_TEXT = re.compile(">[^<]*<")
