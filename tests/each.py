"""Loops in place of parametrized tests, for facts that hold for every item of a long list."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

PARAM = type(pytest.param())


def for_each(names: str | Sequence[str], items: Iterable[Any], ids: Any = None) -> Callable[[Callable[..., None]], Any]:
    """Run a test once for each item; a failure names the item.

    Takes the arguments of ``pytest.mark.parametrize``, but makes one test. The runs share fixtures of function scope.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    items = list(items)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, item in enumerate(items):
                values = item.values if isinstance(item, PARAM) else (item,) if len(keys) == 1 else item
                try:
                    test(**fixtures, **dict(zip(keys, values, strict=True)))
                except BaseException as error:
                    error.add_note(f"failed for {', '.join(keys)} = {label(ids, number, item)}")
                    raise

        del run.__wrapped__
        left = [one for name, one in inspect.signature(test).parameters.items() if name not in keys]
        run.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return run

    return decorate


def label(ids: Any, number: int, item: Any) -> str:
    """The name of an item by the ``ids`` of ``pytest.mark.parametrize``."""
    if isinstance(item, PARAM):
        return str(item.id)
    if ids is None:
        return repr(item)
    return str(ids(item)) if callable(ids) else str(list(ids)[number])
