"""The geometry of the charts: from numbers to coordinates, nothing else.

Horizontal coordinates are percent of the plot's width, so a chart follows the width of its page while text and
strokes keep their size.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MANY_CLASSES = 40
"""Beyond this many classes the bars show the two ends only, and the confusion matrix is left out."""
WEAKEST = 20
STRONGEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar from zero, and its interval where there is one."""

    end: float
    low: float | None
    high: float | None

    @property
    def span(self) -> float:
        """The length of the interval."""
        return 0.0 if self.low is None or self.high is None else round(self.high - self.low, 2)


def bar(value: float | None, low: float | None = None, high: float | None = None) -> Bar | None:
    """A share in percent on an axis from 0 to 100; None where there is no value.

    >>> bar(25.0, 22.42, 27.78)
    Bar(end=25.0, low=22.42, high=27.78)
    """
    if value is None:
        return None
    return Bar(end=_clip(value), low=None if low is None else _clip(low), high=None if high is None else _clip(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which classes a chart shows, from the weakest up."""

    weakest: list[int]
    strongest: list[int]
    """Empty where all classes are shown; they then stand in ``weakest``."""
    left_out: int
    """Classes between the two ends that are not shown."""


def select(values: Sequence[float | None], *, keep: Iterable[int] = ()) -> Selection:
    """Sort classes by value; of many, take the two ends and those in ``keep``.

    Classes without a value come last, and are dropped where there are many.

    >>> select([50.0, None, 20.0]).weakest
    [2, 0, 1]
    """
    present = sorted((k for k, value in enumerate(values) if value is not None), key=lambda k: (values[k], k))
    if len(values) <= MANY_CLASSES:
        absent = [k for k, value in enumerate(values) if value is None]
        return Selection(weakest=present + absent, strongest=[], left_out=0)
    if len(present) <= WEAKEST + STRONGEST:
        return Selection(weakest=present, strongest=[], left_out=0)
    kept, strongest = set(keep), present[-STRONGEST:]
    weakest = present[:WEAKEST] + [k for k in present[WEAKEST:-STRONGEST] if k in kept]
    return Selection(weakest=weakest, strongest=strongest, left_out=len(present) - len(weakest) - STRONGEST)


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shade(count: int, total: int) -> float:
    """How strongly a cell of the confusion matrix is tinted, from 0 to 1.

    The share of the row, bent so that one error in fifty can still be seen.

    >>> shade(0, 10), shade(5, 10), shade(10, 10)
    (0.0, 0.62, 1.0)
    """
    return round((count / total) ** 0.7, 2) if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear axis with round ends."""

    low: float
    high: float
    ticks: list[Tick]

    def at(self, value: float) -> float:
        """The position of a value, in percent of the axis."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def axis(values: Iterable[float]) -> Axis:
    """The smallest round axis within 0 to 100 that holds the values.

    >>> [tick.value for tick in axis([21.0, 38.0]).ticks]
    [20.0, 25.0, 30.0, 35.0, 40.0]
    """
    known = list(values)
    least, most = min(known), max(known)
    step = next(step for step in (1, 2, 5, 10, 20, 25) if (most - least) / step <= 5 or step == 25)
    low = max(0, math.floor(least / step) * step)
    high = min(100, math.ceil(most / step) * step)
    if low == high:
        low, high = max(0, low - step), min(100, high + step)
    count = round((high - low) / step)
    ticks = [Tick(at=round(100 * i / count, 2), value=float(low + i * step)) for i in range(count + 1)]
    return Axis(low=float(low), high=float(high), ticks=ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point with the intervals of both its coordinates; y grows downwards, as on a screen."""

    name: str
    x: float
    x_low: float
    x_high: float
    y: float
    y_low: float
    y_high: float
    text_dx: float
    text_dy: float
    """Where its name goes, in pixels from the point."""
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points on two axes."""

    x_axis: Axis
    y_axis: Axis
    points: list[Point]
    front: list[int]
    """Those that no other beats, from left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knot:
    """A point of a curve, with what is written beneath and above it; y grows downwards."""

    x: float
    y: float
    tick: str
    text: str


def curve(
    points: Sequence[tuple[str, float | None, str]], low: float | None = None, high: float | None = None
) -> list[Knot]:
    """Values (tick, value, text) at equal distances from left to right; the axis is as long as the values, or as told.

    >>> [(knot.x, knot.y) for knot in curve([("0", -1.0, ""), ("1", 3.0, ""), ("2", 1.0, "")])]
    [(16.67, 100.0), (50.0, 0.0), (83.33, 50.0)]
    """
    known = [value for _, value, _ in points if value is not None]
    low = min(known, default=0.0) if low is None else low
    high = max(known, default=0.0) if high is None else high
    return [
        Knot(
            x=round(100 * (place + 0.5) / len(points), 2),
            y=round(100 * (high - value) / (high - low), 2) if high > low else 50.0,
            tick=tick,
            text=text,
        )
        for place, (tick, value, text) in enumerate(points)
        if value is not None
    ]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one beats: none is as high in both, and higher in one (Pareto). From left to right.

    >>> front([(50.0, 20.0), (48.0, 30.0), (47.0, 25.0), (50.0, 18.0)])
    [1, 0]
    """
    kept = [
        number
        for number, (x, y) in enumerate(points)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(kept, key=lambda number: (points[number], number))


RADAR_SIZE = 440
RADAR_RADIUS = 150
FEWEST_SPOKES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoke:
    """The axis of one class, from the centre outwards, and where its name stands."""

    name: str
    x: float
    y: float
    text_x: float
    text_y: float
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Radar:
    """Shares around a centre, in pixels of a square."""

    spokes: list[Spoke]
    shapes: list[str]
    """One polygon for each model, as the points of an SVG polygon."""
    rings: list[tuple[float, int]]
    """Radius and percent."""


def radar(names: Sequence[str], models: Sequence[Sequence[float | None]]) -> Radar | None:
    """The classes of several models; None where there are too few or too many, or one has no value.

    >>> radar(["a", "b", "c", "d"], [[100, 50, 0, 50]]).shapes
    ['220.0,70.0 295.0,220.0 220.0,220.0 145.0,220.0']
    """
    if not FEWEST_SPOKES <= len(names) <= MANY_CLASSES or any(value is None for values in models for value in values):
        return None
    centre = RADAR_SIZE / 2
    angles = [2 * math.pi * number / len(names) for number in range(len(names))]

    def at(angle: float, radius: float) -> tuple[float, float]:
        return round(centre + radius * math.sin(angle), 1), round(centre - radius * math.cos(angle), 1)

    spokes = []
    for name, angle in zip(names, angles, strict=True):
        (x, y), (text_x, text_y) = at(angle, RADAR_RADIUS), at(angle, RADAR_RADIUS + 12)
        side = math.sin(angle)
        anchor = "middle" if abs(side) < 0.2 else "start" if side > 0 else "end"
        short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        spokes.append(Spoke(name=short, x=x, y=y, text_x=text_x, text_y=text_y, anchor=anchor))
    shapes = [
        " ".join(
            "{},{}".format(*at(angle, RADAR_RADIUS * _clip(value or 0.0) / 100))
            for angle, value in zip(angles, values, strict=True)
        )
        for values in models
    ]
    return Radar(spokes=spokes, shapes=shapes, rings=[(RADAR_RADIUS * part / 100, part) for part in (25, 50, 75, 100)])


SCATTER_HEIGHT = 300
"""Pixels; the page gives the plot this height, and names are kept apart on the strength of it."""
_WIDTH = 280
"""Pixels, about: the plot is as wide as its column."""
_LINE, _CHARACTER, _LONGEST = 15.0, 7.2, 16
_ABOVE, _BELOW, _BESIDE = -9.0, 18.0, 8.0


def scatter(points: Sequence[tuple[str, Measured, Measured]]) -> Scatter | None:
    """Named points (name, x, y), their names placed so that they do not cover each other; None without points."""
    if not points:
        return None
    x_axis = axis(bound for _, x, _ in points for bound in (x.low, x.high))
    y_axis = axis(bound for _, _, y in points for bound in (y.low, y.high))
    taken: list[_Box] = []
    placed = []
    for name, x, y in points:
        left, top = x_axis.at(x.value), round(100 - y_axis.at(y.value), 2)
        short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        dx, dy = _free_place(left * _WIDTH / 100, top * SCATTER_HEIGHT / 100, len(short) * _CHARACTER, taken)
        placed.append(
            Point(
                name=short,
                x=left,
                x_low=x_axis.at(x.low),
                x_high=x_axis.at(x.high),
                y=top,
                y_low=round(100 - y_axis.at(y.low), 2),
                y_high=round(100 - y_axis.at(y.high), 2),
                text_dx=dx,
                text_dy=dy,
                anchor="start" if dx > 0 else "end",
            )
        )
    return Scatter(x_axis=x_axis, y_axis=y_axis, points=placed, front=front([(x.value, y.value) for _, x, y in points]))


_Box = tuple[float, float, float]
"""Start, end and base line of a name, in pixels."""


def _free_place(x: float, y: float, length: float, taken: list[_Box]) -> tuple[float, float]:
    """The place beside a point that covers least of the earlier names, the nearest of those."""

    def box(dx: float, dy: float) -> _Box:
        start = x + dx if dx > 0 else x + dx - length
        return start, start + length, y + dy

    def covered(one: _Box) -> float:
        outside = max(0.0, -one[0]) + max(0.0, one[1] - _WIDTH)
        return outside + sum(
            max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for other in taken if abs(one[2] - other[2]) < _LINE
        )

    sides = (_BESIDE, -_BESIDE) if x <= 0.55 * _WIDTH else (-_BESIDE, _BESIDE)
    steps = [base + sign * k * _LINE for k in range(3) for base, sign in ((_ABOVE, -1), (_BELOW, 1))]
    dx, dy = min(((dx, dy) for dy in steps for dx in sides), key=lambda place: covered(box(*place)))
    taken.append(box(dx, dy))
    return dx, dy


def _clip(value: float) -> float:
    return round(min(100.0, max(0.0, value)), 2)
