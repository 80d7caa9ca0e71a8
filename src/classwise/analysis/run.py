"""What analyses look at: a run directory, opened part by part as it is asked for."""

# N examples, K classes

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from classwise.core.errors import InputError
from classwise.data import ImageSet, load_data
from classwise.models.load import load_model
from classwise.reporting import ClassReport, load_report
from classwise.storage.margins import Margins
from classwise.storage.run_directory import RunDirectory
from classwise.storage.verdicts import NATURAL, Verdicts


@dataclass(frozen=True)
class Subject:
    """One model: how it was trained, what it made of which images, and itself.

    What a run directory does not hold is said in one line when an analysis asks for it.
    """

    path: Path
    weights: Path | None = None
    """The file its weights were loaded from, where that was not in a run directory."""
    loaded: nn.Module | None = None
    """The model, where it is at hand."""

    @classmethod
    def open(cls, run: Subject | str | Path) -> Subject:
        """From a directory, or as it is."""
        if isinstance(run, Subject):
            return run
        path = Path(run).expanduser()
        if not path.is_dir():
            raise InputError(f"no such run directory: {path}")
        return cls(path)

    @property
    def name(self) -> str:
        """What to call it: the name its report gives the model, else that of its folder."""
        named = self.report.model.get("name") if (self.path / "report.json").exists() else None
        return str(named or self.path.resolve().name)

    @cached_property
    def report(self) -> ClassReport:
        """Its accuracies."""
        return load_report(self.path)

    @cached_property
    def verdicts(self) -> Verdicts:
        """What became of every example."""
        if self.report.verdicts is None:
            raise InputError(f"{self.path} holds no verdicts.parquet: evaluate the model into it first")
        return self.report.verdicts

    @cached_property
    def margins(self) -> Margins:
        """The margin matrix of the evaluated images."""
        file = RunDirectory(self.path).margins
        if not file.exists():
            raise InputError(f"{self.path} holds no {file.name}: evaluate the model into it with --margins")
        return Margins.load(file)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Its epochs, as ``metrics.jsonl`` has them."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            raise InputError(f"{self.path} holds no metrics.jsonl: it is not the directory of a training")
        try:
            records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        if not records or not all(isinstance(record, dict) for record in records):
            raise InputError(f"{file} holds no epochs")
        return records

    @cached_property
    def images(self) -> ImageSet:
        """The whole data set that the verdicts are about; ``verdicts.index`` counts in it."""
        asked = self.report.dataset
        images = load_data(asked.name, split=asked.split)
        if asked.digest is not None and images.digest() != asked.digest:
            raise InputError(f"{asked.name}/{asked.split} holds other images than {self.path} was evaluated on")
        return images

    @cached_property
    def model(self) -> nn.Module:
        """The model that was evaluated, or trained where none was."""
        if self.loaded is not None:
            return self.loaded
        asked = RunDirectory(self.path).read().get("evaluation", {}).get("asked", {}).get("model")
        spec = str(self.path) if asked is None else asked.get("spec")
        if spec is None:
            raise InputError(f"the model of {self.path} was evaluated from memory and cannot be loaded again")
        if asked is not None and "weights" in asked and self.weights is None:
            raise InputError(f"the model of {self.path} had its weights from {asked['weights']}: give that file again")
        return load_model(spec, weights=self.weights, num_classes=self.num_classes)

    @property
    def classes(self) -> list[str]:
        """The names of the classes; their numbers where only the history is known."""
        if (self.path / "report.json").exists():
            return self.report.dataset.classes
        return [str(label) for label in range(len(self.history[0]["validation"]["n"]))]

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    def key(self, attack: str | None) -> str:
        """The result that is meant: an attack's by its name, else the strongest."""
        key = self.report.strongest if attack is None else attack
        if key == NATURAL and attack is None:
            raise InputError(f"{self.path} was evaluated without an attack")
        self.report[key]
        return key

    def label_of(self, label: str | int | None, key: str) -> int:
        """A class by its name or number; the worst one of a result unless told."""
        if label is None:
            worst = self.report[key].worst
            if worst is None:
                raise InputError(f"{self.path} has no worst class: name one as label")
            return worst.label
        text = str(label)
        if text in self.classes:
            return self.classes.index(text)
        if not text.isdecimal() or int(text) >= self.num_classes:
            raise InputError(f"label = {label!r} is no class of {self.path}")
        return int(text)
