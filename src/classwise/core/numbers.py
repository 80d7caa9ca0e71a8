"""Numbers in user input: fractions as text, and bounded types of settings."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, Field


def parse_number(value: object) -> object:
    """Convert a fraction such as ``8/255`` to a number and return anything else unchanged.

    >>> parse_number("8/255") == 8 / 255, parse_number("0.031")
    (True, '0.031')
    """
    if isinstance(value, str) and "/" in value:
        try:
            return float(Fraction(value.replace(" ", "")))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError(f"{value!r} is not a number like 0.03 or 8/255") from None
    return value


Count = Annotated[int, Field(ge=1)]
"""An integer from 1."""
Positive = Annotated[float, BeforeValidator(parse_number), Field(gt=0)]
"""A positive number, also written as a fraction."""
Share = Annotated[float, BeforeValidator(parse_number), Field(gt=0, lt=1)]
"""A number between 0 and 1, both excluded."""
