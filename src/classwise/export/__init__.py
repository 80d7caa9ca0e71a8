"""Export of a trained and evaluated model as a directory: weights, configuration, model card, code and results.

The directory has the layout of a repository of the Hugging Face hub. It loads as ``hf:DIR``, or by its own ``model.py``
without this package, and is created atomically. Imports ``core``, ``config``, ``storage``, ``data``, ``models``,
``objectives`` and ``reporting``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.export.source import architecture_source
from classwise.models import MODELS
from classwise.models.load import load_model, run_directory
from classwise.models.model_config import CONFIG, WEIGHTS, ModelConfig, Normalization, TrainedFor
from classwise.models.normalize import Normalize
from classwise.objectives import OBJECTIVES
from classwise.reporting import ClassReport, load_report
from classwise.reporting.leaderboard import robustbench
from classwise.reporting.model_card import model_card
from classwise.storage.files import atomic, write_json, write_text
from classwise.storage.run_directory import RunDirectory

CARD, CODE, NUMBERS = "README.md", "model.py", "robustbench.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The model to export."""

    model: nn.Module
    spec: str
    """The spec of its architecture."""
    training: Mapping[str, Any] | None = None
    """The record of its training, if known."""
    repaired: Mapping[str, Any] | None = None
    """The settings of its repair, if it was repaired."""


def export(run: str | Path, to: str | Path, *, weights: str | Path | None = None) -> Path:
    """Write the model that was evaluated in a run directory into a new directory.

    ``weights`` is the weights file of an evaluation without a training run.
    """
    run, to = Path(run), Path(to).expanduser()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"{to} already exists: pass a new directory as --to")
    report = load_report(run)
    subject = _subject(run, report, weights)
    config = _config(subject, report)
    code = architecture_source(config)
    with _new_directory(to) as folder:
        tensors = {name: value.detach().cpu().clone() for name, value in subject.model.state_dict().items()}
        with atomic(folder / WEIGHTS) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
        write_json(folder / CONFIG, config.model_dump(mode="json", by_alias=True))
        write_text(folder / CODE, code)
        write_json(folder / NUMBERS, robustbench([report])[0])
        parameters = sum(parameter.numel() for parameter in subject.model.parameters())
        records: dict[str, Any] = {"training": subject.training, "repaired": subject.repaired}
        card = model_card(report, architecture=subject.spec, parameters=parameters, **records)
        write_text(folder / CARD, card)
    return to


def _subject(run: Path, report: ClassReport, weights: str | Path | None) -> _Subject:
    """Load the model of a report."""
    evaluated, evaluated_weights = report.model.get("spec"), report.model.get("weights")
    folder, record = run, RunDirectory(run).read()
    if "training" not in record and isinstance(evaluated, str) and (found := run_directory(evaluated)) is not None:
        folder, record = found[0], RunDirectory(found[0]).read()  # the training has its own directory
    training = _checked_training(folder, record)
    if training is None and "repair" in record:
        return _repaired(folder, record["repair"])
    if weights is None and evaluated_weights is not None:
        raise InputError(
            f"{run} contains no weights: give the file {evaluated_weights}, with which it was evaluated, as --weights"
        )
    if weights is not None and Path(weights).name != evaluated_weights:
        raise InputError(f"{run} was evaluated with {evaluated_weights or 'its own checkpoint'}, not with {weights}")
    if not isinstance(evaluated, str):
        raise InputError(f"{run}: the evaluated model was a Python object; only models with a spec can be exported")
    spec = _registered(evaluated if training is None else training["asked"]["model"])
    if training is not None and weights is None:
        which = "last" if evaluated.endswith("@last") else "best"
        return _Subject(model=load_model(f"{folder}@{which}"), spec=spec, training=training)
    return _Subject(model=load_model(evaluated, weights=weights, num_classes=len(report.dataset.classes)), spec=spec)


def _repaired(folder: Path, made: Mapping[str, Any]) -> _Subject:
    """Load the model of a repair."""
    spec, trained = _registered(made.get("model")), made.get("trained")
    if made.get("wrapped"):
        raise InputError(f"the class biases of {folder} are in a wrapper around {spec!r}, which cannot be exported")
    training = {**made, "asked": trained} if trained else None
    return _Subject(model=load_model(str(folder)), spec=spec, training=training, repaired=made.get("asked", {}))


def _registered(spec: object) -> str:
    """Return the spec of a registered architecture; others cannot be exported."""
    if not isinstance(spec, str) or Spec.parse(spec.partition(":")[0]).name not in MODELS:
        raise InputError(f"the architecture {spec!r} cannot be exported; expected one of classwise list models")
    return spec


def _checked_training(folder: Path, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the training in the record of a run, if it had one."""
    training: Mapping[str, Any] | None = record.get("training")
    asked = None if training is None else training.get("asked")
    needed = {"model": str, "objective": dict, "norm": str, "eps": str}
    if training is not None and not (
        isinstance(asked, dict) and all(isinstance(asked.get(key), kind) for key, kind in needed.items())
    ):
        raise InputError(f"{folder / 'run.json'}: training.asked is incomplete; expected {', '.join(needed)}")
    return training


def _config(subject: _Subject, report: ClassReport) -> ModelConfig:
    model, trained_for = subject.model, None
    if subject.training is not None:
        asked = subject.training["asked"]
        objective: Any = build("objective", OBJECTIVES, asked["objective"])
        trained_for = TrainedFor(norm=asked["norm"], eps=asked["eps"]) if objective.attack is not None else None
    layer = next((module for module in model.modules() if isinstance(module, Normalize)), None)
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    return ModelConfig(
        schema="classwise/model/1",
        architecture=subject.spec,
        num_classes=len(report.dataset.classes),
        in_channels=first.in_channels,
        classes=report.dataset.classes,
        normalization=layer and Normalization(mean=layer.mean.flatten().tolist(), std=layer.std.flatten().tolist()),
        trained_for=trained_for,
    )


@contextmanager
def _new_directory(to: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to ``to`` on success and removed on failure."""
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp creates private directories
        folder.replace(to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
