"""Run directories as input of analyses: report, verdicts, margins, history, images and model, each loaded on access."""

# N examples, K classes

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from classwise.core.errors import InputError
from classwise.data import ImageSet, load_data
from classwise.models.load import load_model
from classwise.reporting import ClassReport, load_report
from classwise.reporting.comparison import Comparison, compare
from classwise.storage.margins import Margins
from classwise.storage.run_directory import RunDirectory
from classwise.storage.verdicts import NATURAL, WORST_CASE, Verdicts

MOST_RUNS = 6
"""Maximum number of runs that a figure can distinguish."""


@dataclass(frozen=True)
class Run:
    """A run directory. Access to a part that it does not have raises ``InputError``."""

    path: Path
    weights: Path | None = None
    """Weights file of the model, if it was evaluated with ``--weights``."""
    loaded: nn.Module | None = None
    """The model, if it is in memory."""

    @classmethod
    def open(cls, run: Run | str | Path) -> Run:
        """Return a run as it is, or the run in a directory."""
        if isinstance(run, Run):
            return run
        path = Path(run).expanduser()
        if not path.is_dir():
            raise InputError(f"no such run directory: {path}")
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the model in the report, else of the directory."""
        named = self.report.model.get("name") if (self.path / "report.json").exists() else None
        return str(named or self.path.resolve().name)

    @cached_property
    def report(self) -> ClassReport:
        """Accuracies of the evaluation."""
        return load_report(self.path)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Predictions of every evaluated example."""
        if self.report.verdicts is None:
            raise InputError(f"{self.path} has no verdicts.parquet; run classwise evaluate --out {self.path} first")
        return self.report.verdicts

    @cached_property
    def margins(self) -> Margins:
        """Margin matrix of the evaluated images."""
        file = RunDirectory(self.path).margins
        if not file.exists():
            command = f"classwise evaluate --margins --out {self.path}"
            raise InputError(f"{self.path} has no {file.name}; run {command} first")
        return Margins.load(file)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Epochs of the training, from ``metrics.jsonl``."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            raise InputError(f"{self.path} has no metrics.jsonl; expected the directory of a training")
        try:
            records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        if not records or not all(isinstance(record, dict) for record in records):
            raise InputError(f"{file} contains no epochs")
        return records

    @cached_property
    def images(self) -> ImageSet:
        """The whole evaluated data set; ``verdicts.index`` holds positions in it."""
        dataset = self.report.dataset
        images = load_data(dataset.name, split=dataset.split)
        if dataset.digest is not None and images.digest() != dataset.digest:
            raise InputError(
                f"the images of {dataset.name}/{dataset.split} differ from those that {self.path} was evaluated on"
            )
        return images

    @cached_property
    def model(self) -> nn.Module:
        """The evaluated model, or the trained one if there is no evaluation."""
        if self.loaded is not None:
            return self.loaded
        recorded = RunDirectory(self.path).read().get("evaluation", {}).get("asked", {}).get("model")
        spec = str(self.path) if recorded is None else recorded.get("spec")
        if spec is None:
            raise InputError(f"the model of {self.path} was a module in memory and cannot be loaded")
        if recorded is not None and "weights" in recorded and self.weights is None:
            raise InputError(
                f"the model of {self.path} was evaluated with weights from {recorded['weights']}; pass that file with "
                "--weights"
            )
        return load_model(spec, weights=self.weights, num_classes=self.num_classes)

    @property
    def classes(self) -> list[str]:
        """Class names; numbers if there is only a training history."""
        if (self.path / "report.json").exists():
            return self.report.dataset.classes
        return [str(label) for label in range(len(self.history[0]["validation"]["n"]))]

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    def key(self, attack: str | None) -> str:
        """Return the key of a result of the report: the given attack, else the strongest result."""
        key = self.report.strongest if attack is None else attack
        if key == NATURAL and attack is None:
            raise InputError(f"{self.path} was evaluated without an attack")
        self.report[key]
        return key

    def require_classes(self, least: int) -> None:
        """Raise ``InputError`` if there are fewer classes."""
        if self.num_classes < least:
            raise InputError(f"{self.path} has {_classes(self.num_classes)}; at least {least} are needed")

    def label_of(self, label: str | int | None, key: str) -> int:
        """Return the label of a class given by name or number; by default the worst class of a result."""
        if label is None:
            worst = self.report[key].worst
            if worst is None:
                raise InputError(f"{self.path} has no worst class; pass a class as label")
            return worst.label
        text = str(label)
        if text in self.classes:
            return self.classes.index(text)
        if not text.isdecimal() or int(text) >= self.num_classes:
            raise InputError(f"label = {label!r} is not a class of {self.path}")
        return int(text)


def open_runs(runs: Sequence[Run | str | Path], least: int, most: int | None = None) -> list[Run]:
    """Open runs and check their number."""
    if not least <= len(runs) <= (most or len(runs)):
        expected = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(f"got {len(runs)} runs; expected {expected}")
    return [Run.open(run) for run in runs]


def unique_names(runs: Sequence[Run]) -> list[str]:
    """Return a distinct name for each run: its model, or its directory if models share a name, numbered if needed."""
    models = Counter(run.name for run in runs)
    names: list[str] = []
    for run in runs:
        first = run.name if models[run.name] == 1 else run.path.resolve().name
        name, number = first, 1
        while name in names:
            number += 1
            name = f"{first} ({number})"
        names.append(name)
    return names


def compare_runs(runs: Sequence[Run], attack: str | None) -> tuple[str, Comparison]:
    """Return the key of a result that all runs have, and the comparison of the runs with the first one."""
    comparison = compare(*(run.report for run in runs), names=unique_names(runs))
    key = comparison.strongest if attack is None else attack
    if key == NATURAL and attack is None:
        bare = [run.path for run in runs if run.report.strongest == NATURAL]
        raise InputError(f"{bare[0]} was evaluated without an attack" if bare else "the runs have no attack in common")
    comparison[key]
    return key, comparison


def condition(key: str) -> str:
    """Return a phrase for a result: ``under pgd``, ``under all attacks`` or ``without attack``."""
    return {NATURAL: "without attack", WORST_CASE: "under all attacks"}.get(key, f"under {key}")


def capitalized(text: str) -> str:
    """Return a text with its first letter in upper case.

    >>> capitalized("under PGD")
    'Under PGD'
    """
    return text[:1].upper() + text[1:]


def _classes(number: int) -> str:
    return "1 class" if number == 1 else f"{number} classes"
