"""How the examples of an evaluation were shared out among the classes, where they were not all attacked."""

from __future__ import annotations

from classwise.reporting.part import Part


class AllocationInfo(Part):
    """What is known of the worst class after an evaluation that stopped when it knew enough."""

    asked: float
    """Half the width of the interval that was wanted, in percentage points."""
    reached: bool
    """Whether it was reached; if not, the classes that decide it have no more examples."""
    rounds: int
    label: int
    value: float
    low: float
    high: float
    """The worst class, and a 95% interval of the lowest accuracy of any class; it allows for the stopping."""
    contenders: list[int]
    """The classes that may be the worst."""
    attacked: list[int]
    available: list[int]
    """Examples of each class."""
