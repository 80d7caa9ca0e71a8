"""A share in percent with its interval."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from classwise.metrics import wilson
from classwise.reporting.part import Part


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


def percent(share: float) -> float:
    """A share as it stands in reports."""
    return round(100 * share, 4)
