"""Numbers for single classes, as a recipe gives them."""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence

from classwise.core.errors import InputError
from classwise.core.types import Task


def by_class(what: str, given: Sequence[float] | Mapping[str, float], task: Task, default: float) -> list[float]:
    """(K,) from a number for every class, or from a table of classes by name or number; the others get the default."""
    if not isinstance(given, Mapping):
        if len(given) != task.num_classes:
            raise InputError(f"{what} has {len(given)} numbers for {task.num_classes} classes")
        return list(given)
    by_label: dict[int, float] = {}
    for name, value in given.items():
        label = task.label(name)
        if label in by_label:
            raise InputError(f"{what} names class {task.classes[label]!r} twice")
        by_label[label] = value
    return [by_label.get(label, default) for label in range(task.num_classes)]
