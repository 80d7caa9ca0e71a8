"""Which classes belong together: as the data set's authors say, or the user."""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError
from classwise.data.derived import known_superclasses
from classwise.storage.files import read_json

Superclasses = Mapping[str, Sequence[int]]


def superclasses_of(
    dataset: str, num_classes: int, given: Superclasses | Path | str | None = None
) -> dict[str, list[int]]:
    """Groups of labels by name: those given (or in a JSON file), else those known of the data set; often none.

    Together they must hold every class once.
    """
    if isinstance(given, str | Path):
        given = read_json(Path(given))
    if given is None:
        return known_superclasses(dataset, num_classes)
    if not isinstance(given, Mapping):
        raise InputError("superclasses are an object from a name to a list of labels")
    groups = {str(name): [int(label) for label in labels] for name, labels in given.items()}
    held = sorted(label for labels in groups.values() for label in labels)
    if held != list(range(num_classes)):
        raise InputError(f"superclasses must hold each of the labels 0 to {num_classes - 1} once, not {held}")
    return groups


def membership(groups: Mapping[str, Sequence[int]], num_classes: int) -> NDArray[np.int64]:
    """(K,) the number of each class's group."""
    member = np.zeros(num_classes, dtype=np.int64)
    for number, labels in enumerate(groups.values()):
        member[list(labels)] = number
    return member
