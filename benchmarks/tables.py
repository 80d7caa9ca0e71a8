"""How the numbers of a bench are written."""

from __future__ import annotations

from typing import Protocol


class Ranged(Protocol):
    """Something between a least and a most."""

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


def seconds(value: float) -> str:
    """Three digits that count.

    >>> [seconds(value) for value in (0.0012345, 0.1, 1.2345, 98.76, 123.4)]
    ['0.00123', '0.100', '1.23', '98.8', '123']
    """
    digits = next((digits for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4)) if value >= limit), 5)
    return f"{value:.{digits}f}"


def interval(found: Ranged) -> str:
    """From the least to the most."""
    return f"{seconds(found.low)}–{seconds(found.high)}"


def ratio(value: float) -> str:
    """How many times as long."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def plain(value: float) -> str:
    """Two decimals, and no minus before a zero.

    >>> plain(-0.001), plain(1.0)
    ('0.00', '1.00')
    """
    return f"{round(value, 2) + 0.0:.2f}"


def memory(value: float | None) -> str:
    """Bytes in MiB."""
    return "–" if value is None else f"{value / 2**20:.1f} MiB"
