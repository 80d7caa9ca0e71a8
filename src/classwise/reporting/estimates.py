"""Shares in percent with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import Field

from classwise.metrics import rho, wilson
from classwise.reporting.part import Part


class Interval(Protocol):
    """A value with two bounds; each may be None."""

    @property
    def value(self) -> float | None: ...

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


class Estimate(Part):
    """A share in percent with its 95% interval; null without examples."""

    value: float | None
    low: float | None
    high: float | None
    n: int


class ClassEstimate(Estimate):
    """The estimate of one class."""

    label: int
    name: str = Field(alias="class")


def estimate(correct: float, n: int) -> dict[str, Any]:
    """Return the fields of an ``Estimate``; ``correct`` may be a sum of shares."""
    if n == 0:
        return {"value": None, "low": None, "high": None, "n": 0}
    low, high = wilson(correct, n)
    return {"value": percent(correct / n), "low": percent(float(low)), "high": percent(float(high)), "n": n}


def class_estimates(correct: Sequence[float], n: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Return the estimates over all examples and of every class, as fields of a result."""
    by_class = [
        ClassEstimate(label=label, name=name, **estimate(correct[label], n[label]))
        for label, name in enumerate(classes)
    ]
    return {"overall": Estimate(**estimate(sum(correct), sum(n))), "by_class": by_class}


def share(part: Interval, unit: str = "") -> str:
    """Format a value with its unit and, if known, its interval.

    >>> share(Estimate(value=64.5, low=61.51, high=67.43, n=1000), "%")
    '64.5% [61.5, 67.4]'
    """
    if part.value is None:
        return "–"
    interval = "" if part.low is None else f" [{part.low:.1f}, {part.high:.1f}]"
    return f"{part.value:.1f}{unit}{interval}"


def percent(share: float) -> float:
    """Return a share in percent, rounded as in reports."""
    return round(100 * share, 4)


def rounded(value: float | None) -> float | None:
    """Return a number rounded as in reports."""
    return None if value is None else round(float(value), 4)


def rounded_rho(values: tuple[float | None, float | None], baseline: tuple[float | None, float | None]) -> float | None:
    """Return rho of an average and a worst class against a baseline's; None if undefined or not measured."""
    (average, worst), (baseline_average, baseline_worst) = values, baseline
    if average is None or worst is None or baseline_average is None or baseline_worst is None:
        return None
    return rounded(rho(average=average, worst=worst, baseline_average=baseline_average, baseline_worst=baseline_worst))
