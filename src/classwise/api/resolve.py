"""Models and attacks from the arguments of a caller."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.attacks import Fast
from classwise.config.options import EvaluateOptions, RepairOptions
from classwise.config.recipes import repaired_recipe
from classwise.config.spec import Spec
from classwise.core.devices import parse_device, pick_device
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.data import ImageSet
from classwise.evaluation.perturbations import Perturbations
from classwise.evaluation.runner import EvaluationSettings
from classwise.models.load import load_model, run_directory
from classwise.storage.run_directory import RunDirectory


def check_model_type(model: object) -> None:
    """Require a module or a spec."""
    if isinstance(model, type):
        raise InputError(f"model is the class {model.__name__}; pass an instance: {model.__name__}(...)")
    if not isinstance(model, nn.Module | str | os.PathLike):
        raise InputError(
            f"model has type {type(model).__name__}; expected a torch.nn.Module, a run directory or a model spec such "
            "as 'resnet18'"
        )


def resolve_model(
    model: nn.Module | str | Path,
    weights: str | Path | None,
    images: ImageSet,
    device: str | torch.device | None,
    *,
    trust: bool = False,
) -> tuple[nn.Module, Path | None]:
    """Return the model, built for these images, and its run directory if it has one."""
    if isinstance(model, nn.Module):
        if weights is not None:
            raise InputError("weights apply to a model spec, not to a module: load them into the module first")
        if device is not None and not _same_device(parse_device(device), device_of(model)):
            pick_device(device)  # raises if it is not available
            raise InputError(f"the model is on {device_of(model)}, not on {device}: move it there, or pass a spec")
        return model, None
    found = run_directory(str(model))
    loaded = load_model(str(model), weights=weights, trust=trust, **_sizes(images)).to(pick_device(device))
    return loaded, None if found is None else found[0]


def describe_model(model: nn.Module | str | Path, weights: str | Path | None) -> dict[str, Any]:
    """Describe a model for a report: its name, spec, weights and training recipe, as far as known."""
    if isinstance(model, nn.Module):
        return {"name": type(model).__name__}
    found = run_directory(str(model))
    name = str(model) if found is None else "@".join([found[0].resolve().name, *filter(None, found[1:])])
    trained = {} if found is None else recipe_of(RunDirectory(found[0]))
    return (
        {"name": name, "spec": str(model)}
        | ({} if weights is None else {"weights": Path(weights).name})
        | ({"trained": trained} if trained else {})
    )


def recipe_of(directory: RunDirectory) -> Mapping[str, Any]:
    """Return the training recipe of a run directory's model, with its repair if it has one."""
    contents = directory.read()
    if "training" in contents or "repair" not in contents:
        return dict(contents.get("training", {}).get("asked", {}))
    made = contents["repair"]
    return repaired_recipe(made.get("trained", {}), made["asked"]["method"], made["asked"]["choice"])


def make_settings(
    model: nn.Module,
    images: ImageSet,
    perturbations: Perturbations,
    options: EvaluateOptions | RepairOptions,
    *,
    per_class: int | None,
    until_worst_ci: float | None = None,
) -> EvaluationSettings:
    """Combine attacks, corruptions and threat with the options; load the substitute models of transfer attacks."""

    def load(spec: str, weights: str | Path | None) -> nn.Module:
        return load_model(spec, weights=weights, **_sizes(images)).to(device_of(model))

    return EvaluationSettings(
        attacks={key: (spec, attack.with_models(load)) for key, (spec, attack) in perturbations.attacks.items()},
        corruptions=perturbations.corruptions,
        threat=perturbations.threat,
        per_class=per_class,
        batch_size=options.batch_size,
        seed=options.seed,
        engine=options.engine,
        until_worst_ci=until_worst_ci,
    )


def with_exhaustive_fast(attacks: Any) -> list[Any]:
    """Set ``exhaustive`` of the attack ``fast``: the deprecated option of that name."""
    several = list(attacks) if isinstance(attacks, list | tuple) else [attacks]
    changed = [_exhaustive(attack) for attack in several]
    if all(attack is None for attack in changed):
        raise InputError("exhaustive applies to the attack fast only: pass attack fast:exhaustive=true")
    logging.getLogger("classwise").warning("exhaustive is deprecated: use the attack fast:exhaustive=true")
    return [before if after is None else after for before, after in zip(several, changed, strict=True)]


def _exhaustive(attack: Any) -> str | Fast | None:
    """The attack with ``exhaustive`` set; None if it is not ``fast``."""
    if isinstance(attack, Fast):
        return replace(attack, exhaustive=True)
    if isinstance(attack, str) and attack.partition(":")[0].strip() == "fast":
        return str(Spec("fast", {**Spec.parse(attack).options, "exhaustive": "true"}))
    return None


def _sizes(images: ImageSet) -> dict[str, Any]:
    """The sizes of a model that fits the images."""
    classes = None if images.classes is None else len(images.classes)
    return {"num_classes": classes, "in_channels": int(images.images.shape[1])}


def _same_device(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)
