"""Bars with their spread as one SVG file that needs nothing else, in the colours of the reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LOG_BEYOND = 30
"""The axis is logarithmic where the longest bar is more than so many times the shortest."""

NAME, VALUE, PLOT, GAP = 132, 128, 460, 12
ROW, TITLE, TOP, SCALE = 28, 40, 8, 50
"""Widths and heights in pixels."""
NAME_LETTERS, TITLE_LETTERS = 18, 72
"""So many of them fit."""

STYLE = """
:root { --paper: #fff; --ink: #1a1f26; --muted: #59636e; --faint: #858f9a; --line: #e3e7eb; --other: #b9c6d3; --ours: #3d5670 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e6e9ec; --muted: #a3acb6; --faint: #7c8691; --line: #2b3138; --other: #4a5967; --ours: #93b4d4 }
}
svg { background: var(--paper) }
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums }
.title { font-weight: 600 }
.tick { font-size: 12.5px; fill: var(--muted) }
.bar { fill: var(--other) }
.ours .bar { fill: var(--ours) }
.ours text { font-weight: 600 }
.whisker { fill: var(--ink); stroke: var(--paper); stroke-width: 2.5px; paint-order: stroke }
.grid { stroke: var(--line); shape-rendering: crispEdges }
.zero { stroke: var(--faint) }
""".strip()  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A value with its spread, and what is written behind it: the value, and its ratio to another."""

    name: str
    value: float
    low: float
    high: float
    text: str
    ratio: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bars under a title."""

    title: str
    bars: list[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From a number to a share of the axis."""

    low: float
    high: float
    ticks: list[float]
    logarithmic: bool

    def at(self, value: float) -> float:
        """Between 0 and 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return (value - low) / (high - low)


def axis(values: Sequence[float], bounds: Sequence[float] = ()) -> Axis:
    """From zero to a round number, or over whole decades where the values differ too much to be seen beside each other.

    The axis holds the bounds too, but whether it is logarithmic is for the values to say.

    >>> axis([0.3, 1.1]).ticks, axis([0.002, 0.3]).ticks
    ([0.0, 0.5, 1.0, 1.5], [0.001, 0.01, 0.1, 1.0])
    """
    positive = [value for value in (*values, *bounds) if value > 0]
    most = max(positive, default=1.0)
    if max(values) > LOG_BEYOND * min(values) > 0:
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(most))
        ticks = [10.0**power for power in range(first, last + 1)]
        return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, logarithmic=True)
    decade = 10.0 ** math.floor(math.log10(most))
    step = next(step for step in (decade / 5, decade / 2, decade, 2 * decade, 5 * decade) if most <= 5 * step)
    count = math.ceil(most / step - 1e-9)
    ticks = [round(number * step, 12) for number in range(count + 1)]
    return Axis(low=0.0, high=ticks[-1], ticks=ticks, logarithmic=False)


def draw(groups: Sequence[Group], *, label: str) -> str:
    """The chart. ``label`` says what the axis shows."""
    bars = [bar for group in groups for bar in group.bars]
    scale = axis([bar.value for bar in bars], [bound for bar in bars for bound in (bar.low, bar.high)])
    left, width = NAME + GAP, NAME + PLOT + VALUE + 3 * GAP
    bottom = TOP + sum(TITLE + ROW * len(group.bars) for group in groups)
    parts = []
    for number, tick in enumerate(scale.ticks):
        x = left + PLOT * scale.at(tick)
        kind = "grid" if number else "grid zero"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    words = f"{label}{', logarithmic' if scale.logarithmic else ''}; the line is the range over the rounds"
    parts.append(f'<text class="tick" x="{left + PLOT / 2}" y="{bottom + 40}" text-anchor="middle">{words}</text>')
    top = TOP
    for group in groups:
        title = _short(group.title, TITLE_LETTERS)
        parts.append(f'<text class="title" x="{left}" y="{top + 26}" {_HALO}>{escape(title)}</text>')
        top += TITLE
        for bar in group.bars:
            parts.append(_row(bar, scale, left, top))
            top += ROW
    height = bottom + SCALE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join([f'{head} role="img">', f"<style>\n{STYLE}\n</style>", *parts, "</svg>\n"])


_HALO = 'stroke="var(--paper)" stroke-width="4" paint-order="stroke"'
"""Keeps the gridlines out of a title."""


def _row(bar: Bar, scale: Axis, left: int, top: int) -> str:
    end, low, high = (PLOT * scale.at(value) for value in (bar.value, bar.low, bar.high))
    return (
        f'<g class="{"ours" if bar.ours else "other"}">'
        f'<text x="{left - GAP}" y="{top + 19}" text-anchor="end">{escape(_short(bar.name, NAME_LETTERS))}</text>'
        f'<rect class="bar" x="{left}" y="{top + 5}" width="{end:.1f}" height="18"/>'
        f'<rect class="whisker" x="{left + low:.1f}" y="{top + 13}" width="{max(high - low, 1):.1f}" height="2"/>'
        f'<text x="{left + PLOT + GAP}" y="{top + 19}">{escape(bar.text)}</text>'
        f'<text x="{left + PLOT + GAP + VALUE}" y="{top + 19}" text-anchor="end">{escape(bar.ratio)}</text></g>'
    )


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
