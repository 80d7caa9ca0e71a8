"""Describing attack objects of other libraries: their parts, their settings as text, their radius and norm."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import nn

from classwise.core.numbers import parse_number

SAME_RADIUS = 1e-6
"""Relative difference up to which radii count as equal: a library may hold 8/255 in single precision."""


def is_from(thing: Any, package: str) -> bool:
    """Return whether the class of an object, or one of its bases, is defined in a package."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(thing).__mro__)


def parts_of(thing: Any, package: str) -> list[Any]:
    """Return an attack object and the objects of its library that it contains, itself first."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif is_from(value, package) and hasattr(value, "__dict__") and not any(value is part for part in found):
            found.append(value)
            visit(list(vars(value).values()))

    visit(thing)
    return found


NOT_SETTINGS = frozenset({"device", "logger", "model_name", "summary_writer", "supported_mode", "verbose"})
"""Attributes that do not affect the result of an attack."""


def settings_of(thing: Any) -> dict[str, Any]:
    """Return the public attributes of an object that affect its result."""
    names = {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}
    names |= set(getattr(thing, "attack_params", ()))  # ART has some of them as properties
    return {name: getattr(thing, name, None) for name in names - NOT_SETTINGS}


def text_of(settings: Mapping[str, Any], package: str = "") -> str:
    """Return settings as text, in alphabetical order, without those that have no short and stable form."""
    texts = {key: text for key, value in settings.items() if (text := _plain(value, package)) is not None}
    return ", ".join(f"{key}={texts[key]}" for key in sorted(texts))


def _plain(value: Any, package: str) -> str | None:
    """Return a setting as text; None for tensors, modules, functions and None, which have no short and stable form."""
    if isinstance(value, bool | str) or hasattr(value, "within"):
        return repr(value)
    if isinstance(value, Real):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [text for item in value if (text := _plain(item, package)) is not None]
        return f"({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
    if isinstance(value, dict):
        return f"{{{text_of({str(key): item for key, item in value.items()}, package)}}}"
    if package and is_from(value, package) and not isinstance(value, nn.Module | type):
        return f"{type(value).__name__}({text_of(settings_of(value), package)})"
    return None


def radius_text(value: Any) -> str | None:
    """Return a radius as users write it, so that a float of a library and 8/255 are the same threat.

    >>> radius_text(8 / 255), radius_text(0.5), radius_text(0.0123456789), radius_text(None)
    ('8/255', '0.5', '0.0123456789', None)
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    radius = float(value)
    for text in (f"{radius:.6g}", f"{round(radius * 255) if math.isfinite(radius) else 0}/255"):
        if same_radius(text, radius, 1e-7):
            return text
    return str(radius)


def parse_radius(text: str) -> float:
    """Return a radius, written as a number or a fraction."""
    return float(parse_number(text.strip()))  # type: ignore[arg-type]


def same_radius(text: str, radius: float, tolerance: float = SAME_RADIUS) -> bool:
    """Return whether a text denotes this radius."""
    try:
        return math.isclose(parse_radius(text), radius, rel_tol=tolerance)
    except ValueError:
        return False


def norm_text(value: Any) -> str | None:
    """Return the name of a norm, or None if it is not recognized.

    >>> [norm_text(value) for value in (np.inf, "inf", "linf", 2, "L2", 1.0, None, len)]
    ['Linf', 'Linf', 'Linf', 'L2', 'L2', 'L1', None, None]
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        value = f"{float(value):g}"
    if isinstance(value, str) and (found := re.fullmatch(r"[lL]?(inf|\d+(?:\.\d+)?)", value)):
        return f"L{found[1]}"
    return None
