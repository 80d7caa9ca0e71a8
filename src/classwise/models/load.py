"""Loading of models from specs: architectures, run directories, user code, and files of other libraries."""

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
from classwise.models.settings import require_size
from classwise.models.size_limits import no_larger_than_its_weights
from classwise.models.timm_torchvision import build_from_library, is_library, published_weights
from classwise.models.torchscript import load_script
from classwise.models.weights import load_weights, with_weights
from classwise.models.weights_file import SUFFIXES
from classwise.storage.files import read_json

WITH_WEIGHTS = ("hf", "onnx", "torchscript")
"""Prefixes of specs whose models include their weights."""

CHECKPOINTS = ("best", "last")
"""The checkpoints of a run directory, as in ``runs/wat@last``; the first is the default."""


def load_model(
    spec: str,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    allow_untrained: bool = False,
    trust: bool = False,
) -> nn.Module:
    """Load a model with its weights, on the CPU and in evaluation mode.

    ``spec`` is a registered architecture with settings (needs ``weights``), a run directory (``DIR`` for its best
    checkpoint, ``DIR@last`` for its last), ``package.module:factory`` or ``path/to/file.py:factory`` (called without
    arguments), ``timm:NAME``, ``torchvision:NAME``, ``hf:org/name@revision`` or ``hf:DIR``, ``onnx:FILE``, or
    ``torchscript:FILE`` (executed only with ``trust``). A registered name takes precedence over a directory of that
    name; use ``./resnet18`` for the latter.

    ``weights`` replaces the checkpoint of a run directory. A normalization in the weights file is added to a registered
    architecture that has none. ``num_classes`` and ``in_channels`` are those of the data; they are not passed to user
    code. ``allow_untrained`` permits architectures without weights.
    """
    kind = spec.partition(":")[0]
    run = run_directory(spec)
    sizes = {"num_classes": num_classes, "in_channels": in_channels}
    if run is not None:
        folder, which = run
        if weights is not None and which is not None:
            raise InputError(
                f"model {spec!r} names a checkpoint, but weights {str(weights)!r} are given too; expected one of them"
            )
        if weights is None:
            weights = folder / "checkpoints" / f"{which or CHECKPOINTS[0]}.safetensors"
        model = _build_of_run(folder, num_classes, in_channels)
        load_weights(model, weights)
    elif kind in WITH_WEIGHTS:
        if weights is not None:
            raise InputError(f"model {spec!r} includes its weights: leave out the weights {str(weights)!r}")
        model = _load_with_weights(spec, trust=trust, **sizes)
    elif is_library(spec) and weights is None and not allow_untrained:
        published = published_weights(spec)
        model = build_from_library(spec)  # with the number of classes and channels of the published weights
        load_weights(model, published)
    else:
        if weights is None and not allow_untrained and _registered(spec):
            raise InputError(f"model {spec!r} is an architecture without weights: pass --weights FILE")
        model = build_model(spec, **sizes)
        if weights is not None and _registered(spec):
            model = with_weights(model, weights)
        elif weights is not None:
            load_weights(model, weights)
    return model.to("cpu").eval()


def build_model(spec: str, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
    """Build an architecture without loading weights: a registered one, one of timm or torchvision, or user code."""
    name = spec.partition(":")[0].strip()
    if name in WITH_WEIGHTS:
        raise InputError(f"model {spec!r} includes its weights: it can be evaluated, but not built without them")
    if _registered(spec):
        return _build_registered(spec, num_classes=num_classes, in_channels=in_channels)
    if is_library(spec):
        return build_from_library(spec, num_classes=num_classes, in_channels=in_channels)
    if is_attribute_spec(spec):
        model = call_attribute(spec, "model")
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model {spec!r} returned an object of type {type(model).__name__}; expected a torch.nn.Module"
            )
        return model
    if spec.endswith(".py"):
        raise InputError(f"model {spec!r}: expected a factory in the file, as in {spec}:make_model")
    if spec.endswith(SUFFIXES):
        raise InputError(
            f"model {spec!r} is a weights file: give an architecture as the model, and this file as weights"
        )
    if spec.endswith(".onnx"):
        raise InputError(f"model {spec!r} is an ONNX file: use onnx:{spec}")
    if run_directory(name) is not None:
        raise InputError(f"model {spec!r}: a run directory takes no settings; pass {name!r}")
    if "/" in spec or "\\" in spec:
        raise InputError(f"model {spec!r}: no such run directory")
    raise unknown("model", name, MODELS)


def is_open_architecture(spec: str) -> bool:
    """Whether a spec names an architecture that can be built without user code."""
    return _registered(spec) or is_library(spec)


def _load_with_weights(spec: str, *, num_classes: int | None, in_channels: int | None, trust: bool) -> nn.Module:
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
    if not is_open_architecture(config.architecture):  # a factory spec would execute code chosen by the file
        raise InputError(
            f"{folder}: architecture {config.architecture[:80]!r} is unknown; expected a name from classwise list "
            "models, timm:NAME or torchvision:NAME"
        )
    for key, wanted in (("num_classes", num_classes), ("in_channels", in_channels)):
        require_size(spec, key, getattr(config, key), wanted)
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
        require_size(spec, key, settings.setdefault(key, value), value)
    try:
        return factory(**settings)
    except RuntimeError as error:  # out of memory
        raise InputError(f"model {spec!r} cannot be built: {one_line(error, 120)}") from error


def run_directory(spec: str) -> tuple[Path, str | None] | None:
    """Return the directory and the checkpoint that a spec names, or None if it names no directory."""
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
    """Build the architecture of a run's model."""
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(f"{folder} is not a run directory: it contains no run.json")
    run = read_json(path)
    training, repair = (run.get(name) for name in ("training", "repair")) if isinstance(run, dict) else (None, None)
    record = repair if training is None else training
    named = record.get("asked") if isinstance(record, dict) and training is not None else record
    spec = named.get("model") if isinstance(named, dict) else None
    if isinstance(run, dict) and not {"training", "repair"} & run.keys():
        raise InputError(f"{folder} holds no model: it has no record of a training run or of a repair that finished")
    if not isinstance(record, dict) or not isinstance(spec, str):
        raise InputError(
            f"{path} names no architecture; expected the record of a training, or of the repair of a model "
            "that has a spec"
        )
    sizes = {}
    for key, wanted in (("num_classes", num_classes), ("in_channels", in_channels)):
        value = record.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{path}: {key} = {value!r}; expected an integer from 1")
        require_size(str(folder), key, value, wanted)
        sizes[key] = value
    if training is not None:
        return build_model(spec, **sizes)
    return _build_repaired(path, spec, record, sizes)


def _build_repaired(path: Path, spec: str, record: Mapping[str, Any], sizes: Mapping[str, int]) -> nn.Module:
    """Build the architecture of a repaired model, with the wrappers that the repair added."""
    if spec.partition(":")[0] in WITH_WEIGHTS:
        model = _load_with_weights(
            spec, trust=False, num_classes=sizes["num_classes"], in_channels=sizes["in_channels"]
        )
    else:
        model = build_model(spec, **sizes)
    normalization = record.get("normalization")
    try:
        if normalization is not None:
            model = normalized(model, normalization["mean"], normalization["std"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: normalization = {normalization!r:.80}: {one_line(error, 80)}") from None
    return Biased(model, torch.zeros(sizes["num_classes"])) if record.get("wrapped") else model
