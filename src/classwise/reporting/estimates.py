"""A share in percent with its interval."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import Field

from classwise.metrics import wilson
from classwise.reporting.part import Part


class Interval(Protocol):
    """A value between two bounds, or none."""

    @property
    def value(self) -> float | None: ...

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


class Estimate(Part):
    """A share in percent with its interval; null where there are no examples."""

    value: float | None
    low: float | None
    high: float | None
    n: int


class ClassEstimate(Estimate):
    """The estimate of one class."""

    label: int
    name: str = Field(alias="class")


def estimate(correct: float, n: int) -> dict[str, Any]:
    """The fields of an ``Estimate``. ``correct`` may be a sum of shares."""
    if n == 0:
        return {"value": None, "low": None, "high": None, "n": 0}
    low, high = wilson(correct, n)
    return {
        "value": percent(correct / n),
        "low": percent(float(low)),
        "high": percent(float(high)),
        "n": n,
    }


def share(part: Interval, unit: str = "") -> str:
    """A value with its interval where it has one, as it stands in tables and, with its unit, in sentences.

    >>> share(Estimate(value=64.5, low=61.51, high=67.43, n=1000), "%")
    '64.5% [61.5, 67.4]'
    """
    if part.value is None:
        return "–"
    interval = "" if part.low is None else f" [{part.low:.1f}, {part.high:.1f}]"
    return f"{part.value:.1f}{unit}{interval}"


def percent(share: float) -> float:
    """A share as it stands in reports."""
    return round(100 * share, 4)
