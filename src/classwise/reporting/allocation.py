"""How adaptive evaluation allocated examples to classes."""

from __future__ import annotations

from classwise.reporting.part import Part


class AllocationInfo(Part):
    """The worst class after an evaluation that stopped at a given precision."""

    asked: float
    """Target half-width of the interval, in points."""
    reached: bool
    """Whether the target was reached; if not, the candidate classes have no more examples."""
    rounds: int
    label: int
    value: float
    low: float
    high: float
    """The worst class, and a 95% interval of the lowest class accuracy; it accounts for the early stop."""
    contenders: list[int]
    """The classes that may be the worst."""
    attacked: list[int]
    available: list[int]
    """Examples of each class."""
