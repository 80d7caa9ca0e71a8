"""Run directories: files of a run, and ``run.json`` with its request, software and hardware.

``run.json`` has a section each for training, repair and evaluation, because the evaluation of a trained or repaired
model is usually written next to its checkpoints. A section has a fingerprint of everything that determines the result;
a directory with another fingerprint belongs to another run and is not changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import classwise
from classwise.core.errors import InputError
from classwise.metrics.counts import Ints
from classwise.storage.files import read_json, write_json

SCHEMA = "classwise/run/1"
Section = Literal["training", "evaluation", "repair"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a training or a repair, of an evaluation, or of both."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        return self.path / "validation.json"

    @property
    def verdicts(self) -> Path:
        return self.path / "verdicts.parquet"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def examples(self) -> Path:
        return self.path / "examples.json"

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    @property
    def margins(self) -> Path:
        """The margin matrix of the evaluated images."""
        return self.path / "margins.parquet"

    @property
    def validation_margins(self) -> Path:
        """The margin matrix of a training's validation images."""
        return self.path / "validation-margins.parquet"

    @property
    def repair(self) -> Path:
        return self.path / "repair.json"

    def read(self) -> dict[str, Any]:
        """Return the contents of run.json, without sections if there is no file."""
        file = self.path / "run.json"
        if not file.exists():
            return {"schema": SCHEMA}
        contents = read_json(file)
        if not isinstance(contents, dict):
            raise InputError(f"{file} is not a run record: expected an object, got {contents!r:.40}")
        for section in SECTIONS:
            if not isinstance(contents.get(section, {}), dict):
                raise InputError(
                    f"{file} is not a run record: expected an object in {section}, got {contents[section]!r:.40}"
                )
        return contents

    def producer(self) -> dict[str, Any]:
        """Return the section of the training or repair that produced the model; empty if there is none."""
        contents = self.read()
        found: dict[str, Any] = contents.get("training", contents.get("repair", {}))
        return found

    def held_out(self, total: int) -> Ints:
        """Return the indices of the validation images among ``total`` training images."""
        record = read_json(self.validation)
        indices = record.get("indices") if isinstance(record, dict) else None
        if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < total for index in indices):
            raise InputError(f"{self.validation} does not list indices of held-out images below {total}")
        return np.unique(np.asarray(indices, dtype=np.int64))

    def claim(
        self,
        section: Section,
        fingerprint: str,
        details: dict[str, Any],
        *,
        resume: bool,
        beside: Section | None = None,
    ) -> bool:
        """Reserve the directory for a run and return whether there is an interrupted run to resume.

        Raises InputError, without changes, if the directory holds another run, or the same run and ``resume`` is False.
        An existing section ``beside`` belongs to this run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file, not a directory")
        contents = self.read()
        present = contents.get(section)
        if present is None:
            for other in SECTIONS:
                if other in contents and other != beside:
                    how = f"pass {self.path} as the model, or " if section == "evaluation" else ""
                    raise InputError(f"{self.path} holds the {other} of another run: {how}choose another --out")
            # Ignore hidden files: temporary files of killed processes, files of file managers.
            names = [entry.name for entry in self.path.iterdir()] if self.path.exists() else []
            visible = sorted(name for name in names if not name.startswith("."))
            if visible and "run.json" not in visible:
                raise InputError(f"{self.path} is not empty and holds no run ({visible[0]}): choose another --out")
        elif present.get("fingerprint") != fingerprint:
            changed = ", ".join(_differences(present.get("asked", {}), details.get("asked", {}))) or "its inputs"
            raise InputError(f"{self.path} holds another {section} (differs in {changed}): choose another --out")
        elif not resume:
            raise InputError(f"{self.path} already holds this {section}: add --resume to continue it")
        else:
            return True
        contents[section] = {
            "fingerprint": fingerprint,
            **details,
            "versions": versions(),
            "hardware": hardware(),
            "started": _now(),
        }
        write_json(self.path / "run.json", contents)
        return False

    def release(self, section: Section) -> None:
        """Remove a section whose run failed; its files stay for another run."""
        contents = self.read()
        del contents[section]
        write_json(self.path / "run.json", contents)

    def note(self, section: Section, **details: Any) -> None:
        """Add details to a section."""
        contents = self.read()
        contents[section] |= details
        write_json(self.path / "run.json", contents)

    def finish(self, section: Section, **details: Any) -> None:
        """Mark a section as finished and add its results."""
        self.note(section, finished=_now(), **details)


def versions() -> dict[str, str]:
    """Return the versions of the software that determines a result."""
    names = ("torch", "numpy", "pillow")
    found = {"python": platform.python_version(), "classwise": classwise.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def hardware() -> dict[str, Any]:
    """Describe the machine."""
    import torch

    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in _differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    if before == after:
        return []
    if before is None or after is None:
        there, requested = ("not set" if value is None else str(value).partition("(")[0] for value in (before, after))
        return [f"{prefix}: {there} there, {requested} requested"]
    return [f"{prefix}: {before} there, {after} requested"]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
