"""Settings per class, as recipes write them."""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence

from classwise.core.errors import InputError
from classwise.core.types import Task


def by_class(what: str, given: Sequence[float] | Mapping[str, float], task: Task, default: float) -> list[float]:
    """Return K numbers from one per class, or from a table of class names or numbers with a default for the others."""
    if not isinstance(given, Mapping):
        if len(given) != task.num_classes:
            raise InputError(f"{what} must have one number for each of {task.num_classes} classes, got {len(given)}")
        return list(given)
    by_label: dict[int, float] = {}
    for name, value in given.items():
        label = task.label(name)
        if label in by_label:
            raise InputError(f"{what} contains class {task.classes[label]!r} twice")
        by_label[label] = value
    return [by_label.get(label, default) for label in range(task.num_classes)]
