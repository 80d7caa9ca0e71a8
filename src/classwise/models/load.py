"""Models from specs: registered architectures, run directories, the user's own factories, everybody else's models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.config.plugins import call_attribute, is_attribute_spec
from classwise.config.spec import Spec, convert
from classwise.core.errors import InputError, one_line, unknown
from classwise.models import MODELS
from classwise.models.heads import Biased
from classwise.models.hub import folder_of, transformers_model
from classwise.models.model_config import WEIGHTS, exported, read_config
from classwise.models.normalize import normalized
from classwise.models.onnx import OnnxModel
from classwise.models.size_limits import no_larger_than_its_weights
from classwise.models.timm_torchvision import build_zoo, is_zoo, published_weights
from classwise.models.torchscript import load_script
from classwise.models.weights import load_weights, with_weights
from classwise.models.weights_file import SUFFIXES
from classwise.storage.files import read_json

WHOLE = ("hf", "onnx", "torchscript")
"""Prefixes of models that come with their weights."""

CHECKPOINTS = ("best", "last")
"""The checkpoints of a run directory that a spec may name, as in ``runs/wat@last``; best is the default."""


def load_model(
    spec: str,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    allow_untrained: bool = False,
    trust: bool = False,
) -> nn.Module:
    """A model ready to be evaluated: on the CPU, in evaluation mode, weights loaded.

    ``spec`` is a registered architecture with settings (needs ``weights``), a run directory (``DIR`` for
    its best checkpoint, ``DIR@last`` for its last), ``package.module:factory`` or
    ``path/to/file.py:factory``, called without arguments, ``timm:NAME``, ``torchvision:NAME``,
    ``hf:org/name@revision`` or ``hf:DIR``, ``onnx:FILE``, or ``torchscript:FILE``, a program that runs only with
    ``trust``. A registered name wins over a directory of that name; write ``./resnet18`` for the latter.
    ``weights`` given with a run directory replace its checkpoint; a normalization that they bring is put into a
    registered architecture without one. ``num_classes`` and ``in_channels`` are what the data has; a factory of the
    user's is not told them.
    """
    kind = spec.partition(":")[0]
    run = run_directory(spec)
    sizes = {"num_classes": num_classes, "in_channels": in_channels}
    if run is not None:
        folder, which = run
        if weights is not None and which is not None:
            raise InputError(f"model {spec!r} names its checkpoint, and the weights are another: {weights}")
        if weights is None:
            weights = folder / "checkpoints" / f"{which or CHECKPOINTS[0]}.safetensors"
        model = _build_of_run(folder, num_classes, in_channels)
        load_weights(model, weights)
    elif kind in WHOLE:
        if weights is not None:
            raise InputError(f"model {spec!r} has weights of its own: leave out {weights}")
        model = _load_whole(spec, trust=trust, **sizes)
    elif is_zoo(spec) and weights is None and not allow_untrained:
        published = published_weights(spec)
        model = build_zoo(spec)  # with the classes and channels of the published weights
        load_weights(model, published)
    else:
        if weights is None and not allow_untrained and _registered(spec):
            raise InputError(f"model {spec!r} is an architecture without weights: give its weights file too")
        model = build_model(spec, **sizes)
        if weights is not None and _registered(spec):
            model = with_weights(model, weights)
        elif weights is not None:
            load_weights(model, weights)
    return model.to("cpu").eval()


def build_model(spec: str, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
    """An architecture as its factory makes it: of a registered name, of another package, or the user's own."""
    name = spec.partition(":")[0].strip()
    if name in WHOLE:
        raise InputError(f"model {spec!r} comes with its weights: it can be evaluated, but not be built anew")
    if _registered(spec):
        return _build_registered(spec, num_classes=num_classes, in_channels=in_channels)
    if is_zoo(spec):
        return build_zoo(spec, num_classes=num_classes, in_channels=in_channels)
    if is_attribute_spec(spec):
        model = call_attribute(spec, "model")
        if not isinstance(model, nn.Module):
            raise InputError(f"model {spec!r} returned {type(model).__name__}; expected a torch.nn.Module")
        return model
    if spec.endswith(".py"):
        raise InputError(f"model {spec!r}: expected the name of a factory in it, as in {spec}:make_model")
    if spec.endswith(SUFFIXES):
        raise InputError(f"model {spec!r} is a weights file: give the architecture as model, this as weights")
    if spec.endswith(".onnx"):
        raise InputError(f"model {spec!r} is an ONNX file: write onnx:{spec}")
    if "/" in spec or "\\" in spec:
        raise InputError(f"model {spec!r}: no such run directory")
    raise unknown("model", name, MODELS)


def is_open_architecture(spec: str) -> bool:
    """Whether anybody can build it by its name, without code that only its author has."""
    return _registered(spec) or is_zoo(spec)


def _load_whole(spec: str, *, num_classes: int | None, in_channels: int | None, trust: bool) -> nn.Module:
    kind, _, place = spec.partition(":")
    path = Path(place.strip()).expanduser()
    if kind == "onnx":
        return OnnxModel(path)
    if kind == "torchscript":
        return load_script(path, trust=trust)
    folder = folder_of(spec)
    content = read_config(folder)
    config = exported(folder, content)
    if config is None:
        return transformers_model(folder, num_classes)
    if not is_open_architecture(config.architecture):  # a module's name would run code that the file chooses
        raise InputError(f"{folder}: architecture {config.architecture[:80]!r} is not one that is known here")
    for key, wanted in (("num_classes", num_classes), ("in_channels", in_channels)):
        if wanted is not None and getattr(config, key) != wanted:
            raise InputError(f"model {spec!r} has {key}={getattr(config, key)}, but {wanted} are needed")
    with no_larger_than_its_weights(folder):
        model = build_model(config.architecture, num_classes=config.num_classes, in_channels=config.in_channels)
    return with_weights(model, folder / WEIGHTS)


def _registered(spec: str) -> bool:
    return spec.partition(":")[0].strip() in MODELS


def _build_registered(spec: str, **wanted: int | None) -> nn.Module:
    parsed = Spec.parse(spec)
    factory = MODELS[parsed.name]
    owner = f"model {parsed.name!r}"
    settings = convert(owner, factory, parsed.options)
    given = convert(owner, factory, {key: value for key, value in wanted.items() if value is not None})
    for key, value in given.items():
        if settings.setdefault(key, value) != value:
            raise InputError(f"model {spec!r}: {key}={settings[key]}, but {value} are needed")
    try:
        return factory(**settings)
    except RuntimeError as error:  # torch cannot allocate what was asked for
        raise InputError(f"model {spec!r} cannot be built: {one_line(error, 120)}") from error


def run_directory(spec: str) -> tuple[Path, str | None] | None:
    """The folder and the checkpoint that a spec names, where it names a directory."""
    if not spec or _registered(spec):
        return None
    if Path(spec).is_dir():
        return Path(spec), None
    folder, at, which = spec.rpartition("@")
    if not at or not Path(folder).is_dir():
        return None
    if which not in CHECKPOINTS:
        raise unknown(f"checkpoint of {folder}:", which, CHECKPOINTS)
    return Path(folder), which


def _build_of_run(folder: Path, num_classes: int | None, in_channels: int | None) -> nn.Module:
    """The architecture of a run's model, for the classes and channels it was made for."""
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(f"{folder} is not a run directory: it has no run.json")
    run = read_json(path)
    training, repair = (run.get(name) for name in ("training", "repair")) if isinstance(run, dict) else (None, None)
    made = repair if training is None else training
    named = made.get("asked") if isinstance(made, dict) and training is not None else made
    spec = named.get("model") if isinstance(named, dict) else None
    if not isinstance(made, dict) or not isinstance(spec, str):
        raise InputError(
            f"{path} names no architecture: it is not the record of a training, nor of the repair of a "
            "model that can be loaded again"
        )
    sizes = {}
    for key, wanted in (("num_classes", num_classes), ("in_channels", in_channels)):
        value = made.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{path}: {key} = {value!r}: expected a number from 1")
        if wanted is not None and wanted != value:
            raise InputError(f"model {str(folder)!r} was trained with {key}={value}, but {wanted} are needed")
        sizes[key] = value
    if training is not None:
        return build_model(spec, **sizes)
    return _build_repaired(path, spec, made, sizes)


def _build_repaired(path: Path, spec: str, made: Mapping[str, Any], sizes: Mapping[str, int]) -> nn.Module:
    """The architecture of a repaired model: the original one, with what was put around it."""
    if spec.partition(":")[0] in WHOLE:
        model = _load_whole(spec, trust=False, num_classes=sizes["num_classes"], in_channels=sizes["in_channels"])
    else:
        model = build_model(spec, **sizes)
    normalization = made.get("normalization")
    try:
        if normalization is not None:
            model = normalized(model, normalization["mean"], normalization["std"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: normalization = {normalization!r:.80}: {one_line(error, 80)}") from None
    return Biased(model, torch.zeros(sizes["num_classes"])) if made.get("wrapped") else model
