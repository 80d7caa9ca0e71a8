"""How numbers read, where several answers tell the same kind."""

# K classes

from __future__ import annotations

from classwise.analysis.correlation import Correlation


def told(part: Correlation) -> str:
    """A coefficient with its interval and p value."""
    p = "" if part.p_value is None else ", p < 0.001" if part.p_value < 0.001 else f", p = {part.p_value:.3f}"
    return f"{part}{p}"


def decimal(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none; a zero has no sign.

    >>> decimal(-0.0001, 2), decimal(None, 2)
    ('0.00', '–')
    """
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def left_out(shown: int, classes: int) -> str:
    """What stands under a table that does not show every class."""
    return "" if shown == classes else f"The {shown} weakest of {classes} classes; the parquet file holds them all."
