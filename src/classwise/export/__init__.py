"""A trained and evaluated model as a directory for others: weights, configuration, model card, code and numbers.

The directory is laid out as a repository of the Hugging Face hub and loads back as ``hf:DIR``, or by its own
``model.py`` without this package. It is there as a whole or not at all.
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
    """What is exported."""

    model: nn.Module
    spec: str
    """Of its architecture."""
    training: Mapping[str, Any] | None
    repaired: Mapping[str, Any] | None = None
    """How it was repaired after its training, if it was."""


def export(run: str | Path, to: str | Path, *, weights: str | Path | None = None) -> Path:
    """Write the model of a run directory, as it was evaluated there, into a new directory.

    ``weights``: the file that an evaluation without a training was made with.
    """
    run, to = Path(run), Path(to).expanduser()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"{to} exists already: --to names a new directory")
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
        made: dict[str, Any] = {"training": subject.training, "repaired": subject.repaired}
        card = model_card(report, architecture=subject.spec, parameters=parameters, **made)
        write_text(folder / CARD, card)
    return to


def _subject(run: Path, report: ClassReport, weights: str | Path | None) -> _Subject:
    """The model that a report is about."""
    asked, evaluated = report.model.get("spec"), report.model.get("weights")
    folder, training = run, _training(run)
    if training is None and isinstance(asked, str) and (found := run_directory(asked)) is not None:
        folder, training = found[0], _training(found[0])  # it was evaluated somewhere else than trained
    if (repaired := _repaired(folder)) is not None:
        return repaired
    if weights is None and evaluated is not None:
        raise InputError(f"{run} holds no weights: give those that it was evaluated with ({evaluated}) as --weights")
    if weights is not None and Path(weights).name != evaluated:
        raise InputError(f"{run} was evaluated with {evaluated or 'a checkpoint of its own'}, not with {weights}")
    if not isinstance(asked, str):
        raise InputError(f"{run} does not say what it was evaluated from: a model in memory cannot be exported")
    spec = asked if training is None else training["asked"]["model"]
    if Spec.parse(spec.partition(":")[0]).name not in MODELS:
        raise InputError(f"the architecture {spec!r} is not a registered one: only those can be exported")
    if training is not None and weights is None:
        which = "last" if asked.endswith("@last") else "best"
        return _Subject(model=load_model(f"{folder}@{which}"), spec=spec, training=training)
    model = load_model(asked, weights=weights, num_classes=len(report.dataset.classes))
    return _Subject(model=model, spec=spec, training=None)  # of these weights nothing more is known


def _repaired(folder: Path) -> _Subject | None:
    """The model of a repair's directory; None if the directory is that of a training."""
    contents = RunDirectory(folder).read()
    if "repair" not in contents or "training" in contents:
        return None
    made = contents["repair"]
    spec, trained = made.get("model"), made.get("trained") or None
    if not isinstance(spec, str) or Spec.parse(spec.partition(":")[0]).name not in MODELS:
        raise InputError(f"the architecture {spec!r} is not a registered one: only those can be exported")
    if made.get("wrapped"):
        raise InputError(f"the class biases of {folder} are in a wrapper around {spec!r}, which cannot be exported")
    training = None if trained is None else {**made, "asked": trained}
    return _Subject(model=load_model(str(folder)), spec=spec, training=training, repaired=made.get("asked", {}))


def _training(folder: Path) -> Mapping[str, Any] | None:
    """What a run directory says of its training, if it had one."""
    training = RunDirectory(folder).read().get("training")
    asked = None if training is None else training.get("asked")
    needed = {"model": str, "objective": dict, "norm": str, "eps": str}
    if training is not None and not (
        isinstance(asked, dict) and all(isinstance(asked.get(key), kind) for key, kind in needed.items())
    ):
        raise InputError(f"{folder / 'run.json'} does not say what was asked of its training: {', '.join(needed)}")
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
    """A directory to fill, which takes its place when it is full and is removed when something goes wrong."""
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp makes directories private
        folder.replace(to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
