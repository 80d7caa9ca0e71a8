"""Packages that only some models need."""

from __future__ import annotations

import importlib
from typing import Any

from classwise.core.errors import InputError, one_line


def optional(module: str, extra: str) -> Any:
    """An optional package, or the line that says how to get it."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that does not go with this torch may raise anything
        hint = f"pip install 'classwise[{extra}]'"
        raise InputError(f"{module} is needed and cannot be imported: {hint} ({one_line(error, 120)})") from None
