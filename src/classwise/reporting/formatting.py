"""Numbers, names and lists as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

SIGNIFICANT = 0.05
"""Significance level of (corrected) p-values."""
ABSENT = "–"


def plain(text: str) -> str:
    """Return an untrusted text as one line without control and direction characters.

    >>> plain(" a\\x1b[31m\\nb\\u202e\\tc ")
    'a [31m b c'
    """
    return " ".join("".join(map(_harmless, text)).split())


def _harmless(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cf":  # direction marks, joiners and other invisible characters
        return ""
    return {"Cc": " ", "Cs": "\N{REPLACEMENT CHARACTER}"}.get(category, character)


def printable(text: str) -> str:
    """Replace characters that cannot be written to a file (surrogates) or that change the direction of the text."""
    return _UNPRINTABLE.sub("\ufffd", text)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def class_name(name: str) -> str:
    """Return a class name for a sentence; a bare number gets the word ``class``.

    >>> class_name("cat"), class_name("8")
    ('cat', 'class 8')
    """
    return f"class {name}" if name.strip().isdigit() else name


def listing(parts: Sequence[str]) -> str:
    """Join the parts of an enumeration.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def number(value: float | None, digits: int = 1) -> str:
    """Format a number; a dash for None.

    >>> number(1234.56), number(None), number(-0.01)
    ('1,234.6', '–', '0.0')
    """
    if value is None:
        return ABSENT
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0 turns −0.0 into 0.0


def percent(value: float | None) -> str:
    """Format a percentage; a dash for None."""
    return ABSENT if value is None else f"{number(value)}%"


def signed(value: float | None, digits: int = 1) -> str:
    """Format a difference with its sign.

    >>> signed(2.0), signed(-2.0), signed(0.0), signed(0.403, 2)
    ('+2.0', '−2.0', '0.0', '+0.40')
    """
    text = number(value, digits)
    return f"+{text}" if value is not None and round(value, digits) > 0 else text


def interval(low: float | None, high: float | None) -> str:
    """Format the bounds of an interval; empty if one is None."""
    return "" if low is None or high is None else f"{number(low)}–{number(high)}"


def p_text(p_value: float) -> str:
    """Format a p-value, never rounded across the level of significance.

    >>> p_text(0.0004), p_text(0.0123), p_text(0.0496), p_text(1.0)
    ('p < 0.001', 'p = 0.012', 'p = 0.0496', 'p = 1')
    """
    if p_value < 0.001:
        return "p < 0.001"
    if p_value == 1:
        return "p = 1"
    text = f"{p_value:.3f}"
    return f"p = {p_value:.4f}" if text == f"{SIGNIFICANT:.3f}" and p_value != SIGNIFICANT else f"p = {text}"
