"""Figure parts that several analyses share: which classes are shown, and series of estimates."""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from classwise.reporting.figures import Series

MOST_CLASSES = 40
"""Maximum number of classes that a figure shows; of more it shows the ``WEAKEST`` weakest."""
WEAKEST = 20


def shown_classes(values: Sequence[float | None]) -> list[int]:
    """Return the labels that a figure shows, in label order: all, or the weakest; absent classes rank last."""
    if len(values) <= MOST_CLASSES:
        return list(range(len(values)))
    return sorted(weakest_first(values)[:WEAKEST])


def weakest_first(values: Sequence[float | None]) -> list[int]:
    """Return all labels by their value, absent classes last.

    >>> weakest_first([30.0, None, 10.0])
    [2, 0, 1]
    """
    return sorted(range(len(values)), key=lambda label: (values[label] is None, values[label] or 0.0))


def shown_suffix(shown: Sequence[int], classes: Sequence[str], of: str = "") -> str:
    """Return the end of a figure's title if it does not show all classes."""
    return f", the {len(shown)} weakest classes{of}" if len(shown) < len(classes) else ""


def column_series(name: str, frame: pd.DataFrame, column: str, **look: Any) -> Series:
    """Return a column of a frame as a series, with its interval if the frame has it."""
    known = frame.astype(object).where(frame.notna(), None)
    look |= {end: list(known[f"{column}_{end}"]) for end in ("low", "high") if f"{column}_{end}" in known}
    return Series(name=name, y=list(known[column]), **look)
