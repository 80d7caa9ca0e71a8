"""Import of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from classwise.core.errors import InputError, one_line


def optional(module: str, extra: str) -> Any:
    """Import an optional package, or raise an ``InputError`` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # an incompatible package may raise any exception
        hint = f"pip install 'classwise[{extra}]'"
        raise InputError(f"{module} is required and cannot be imported: {hint} ({one_line(error, 120)})") from None
