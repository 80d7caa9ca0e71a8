"""Several runs side by side: opened, named apart, and compared where that is fair."""

# K classes

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from classwise.analysis.run import Subject
from classwise.core.errors import InputError
from classwise.reporting.comparison import Comparison, compare
from classwise.storage.verdicts import NATURAL

MOST_CLASSES = 40
"""Classes that a figure shows one by one; of more it shows the weakest."""
WEAKEST = 20
MOST_RUNS = 6
"""Runs that can be told apart in one figure."""


def opened(runs: Sequence[Subject | str | Path], least: int, most: int | None = None) -> list[Subject]:
    """Every run, if there are as many as are needed."""
    if not least <= len(runs) <= (most or len(runs)):
        expected = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(f"got {len(runs)} runs; expected {expected}")
    return [Subject.open(run) for run in runs]


def names_apart(subjects: Sequence[Subject]) -> list[str]:
    """A name for each run: the model's, the folder's where models share one, and numbered where folders do too."""
    models = Counter(subject.name for subject in subjects)
    names: list[str] = []
    for subject in subjects:
        given = subject.name if models[subject.name] == 1 else subject.path.resolve().name
        name, number = given, 1
        while name in names:
            number += 1
            name = f"{given} ({number})"
        names.append(name)
    return names


def compared(subjects: Sequence[Subject], attack: str | None) -> tuple[str, Comparison]:
    """The result that is meant, and all runs beside the first: the same data, classes, threat and settings."""
    comparison = compare(*(subject.report for subject in subjects), names=names_apart(subjects))
    key = comparison.strongest if attack is None else attack
    if key == NATURAL and attack is None:
        bare = [subject.path for subject in subjects if subject.report.strongest == NATURAL]
        raise InputError(f"{bare[0]} was evaluated without an attack" if bare else "the runs have no attack in common")
    comparison[key]
    return key, comparison


def in_view(values: Sequence[float | None]) -> list[int]:
    """The labels that a figure shows, as they come in the data: all, or of many the weakest; absent ones last."""
    if len(values) <= MOST_CLASSES:
        return list(range(len(values)))
    weakest = sorted(range(len(values)), key=lambda label: (values[label] is None, values[label] or 0.0))
    return sorted(weakest[:WEAKEST])
