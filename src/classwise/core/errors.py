"""Errors for users: single lines that name the value and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Invalid input. Commands print it on one line and exit with 2."""


class Diverged(RuntimeError):
    """Training has diverged: the loss is NaN, infinite or far larger than at the start."""


def unknown(kind: str, name: object, options: Iterable[str]) -> InputError:
    """Return an error for a name that is not registered, with the closest registered name.

    >>> str(unknown("attack", "pdg", ["pgd", "fgsm"]))
    "unknown attack 'pdg': did you mean 'pgd'? (known: fgsm, pgd)"
    """
    known = sorted(options)
    by_lower_case = {option.lower(): option for option in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.5)
    hint = f": did you mean {by_lower_case[close[0]]!r}?" if close else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known) or 'none'})")


def one_line(error: BaseException, limit: int = 300) -> str:
    """Format an exception on a single line.

    >>> one_line(ValueError("first\\n  second"))
    'ValueError: first second'
    """
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = text[:limit].rstrip() + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
