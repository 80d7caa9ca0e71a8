"""Models, devices and attacks from what a caller passed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from classwise.attacks.base import AnyAttack
from classwise.config.recipes import repaired_recipe
from classwise.core.choices import EngineName
from classwise.core.devices import pick_device
from classwise.core.errors import InputError, unknown
from classwise.core.model_calls import device_of
from classwise.data import ImageSet
from classwise.models.load import load_model, run_directory
from classwise.storage.run_directory import RunDirectory


def resolve_model(
    model: nn.Module | str | Path,
    weights: str | Path | None,
    images: ImageSet,
    device: str | torch.device | None,
    *,
    trust: bool = False,
) -> tuple[nn.Module, Path | None]:
    """The model, ready for these images, and its run directory if it has one."""
    if isinstance(model, nn.Module):
        if weights is not None:
            raise InputError("weights go with a model spec; a module in memory has its own")
        if device is not None and not _same_device(torch.device(device), device_of(model)):
            raise InputError(f"the model is on {device_of(model)}, not {device}: move it yourself, or pass a spec")
        return model, None
    known = None if images.classes is None else len(images.classes)
    sizes = {"num_classes": known, "in_channels": images.images.shape[1]}
    found = run_directory(str(model))
    loaded = load_model(str(model), weights=weights, trust=trust, **sizes).to(pick_device(device))
    return loaded, None if found is None else found[0]


def describe_model(model: nn.Module | str | Path, weights: str | Path | None) -> dict[str, Any]:
    """What a report says of the model: a short name, and what it was asked for by."""
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
    """How the model of a run directory was made: the recipe of its training, with its repair if it had one."""
    contents = directory.read()
    if "training" in contents or "repair" not in contents:
        return dict(contents.get("training", {}).get("asked", {}))
    made = contents["repair"]
    return repaired_recipe(made.get("trained", {}), made["asked"]["method"], made["asked"]["choice"])


def checked_engine(engine: str) -> EngineName:
    """An engine by its name."""
    if engine not in get_args(EngineName):
        raise unknown("engine", engine, get_args(EngineName))
    return cast(EngineName, engine)


def with_substitutes(
    attacks: Mapping[str, tuple[str, AnyAttack]], images: ImageSet, device: torch.device
) -> dict[str, tuple[str, AnyAttack]]:
    """The attacks, with the substitutes of transfers loaded beside the model."""

    def load(spec: str, weights: str | Path | None) -> nn.Module:
        known = None if images.classes is None else len(images.classes)
        return load_model(spec, weights=weights, num_classes=known, in_channels=images.images.shape[1]).to(device)

    return {key: (spec, attack.with_models(load)) for key, (spec, attack) in attacks.items()}


def _same_device(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)
