"""Architectures of timm and torchvision: ``timm:NAME`` and ``torchvision:NAME``, with settings after a comma.

Only the architecture comes from the package. Weights come from a file, or for timm as safetensors from the Hugging Face
hub; the packages' own downloads, which unpickle, are not used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from classwise.config.spec import Spec, convert
from classwise.core.errors import InputError, one_line, unknown
from classwise.core.hub import from_hub
from classwise.models.model_config import WEIGHTS
from classwise.models.normalize import NORMALIZATIONS
from classwise.models.optional_packages import optional
from classwise.models.preprocess import Prepared, Resize
from classwise.models.settings import Count, Normalization, require_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySettings:
    """The settings of every architecture of timm and torchvision."""

    num_classes: Count | None = None
    in_channels: Count | None = None
    normalize: Normalization | Literal["none", "own"] = "own"
    """``own`` is the normalization of the library's published weights."""
    size: Count | None = None
    """The side to which images are resized; None keeps their size."""
    resize: Literal["nearest", "bilinear", "bicubic"] = "bilinear"


def is_library(spec: str) -> bool:
    """Whether a spec names an architecture of timm or torchvision.

    >>> is_library("timm:resnet18"), is_library("resnet18")
    (True, False)
    """
    return spec.partition(":")[0] in LIBRARIES


def parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """Split a spec into library, name and settings, which recipes join by a colon.

    >>> parse("timm:resnet18.a1_in1k,size=64"), parse("torchvision:vgg16:size=64,resize=nearest")
    (('timm', 'resnet18.a1_in1k', {'size': '64'}), ('torchvision', 'vgg16', {'size': '64', 'resize': 'nearest'}))
    """
    library, _, rest = spec.partition(":")
    name, *settings = re.split("[,:]", rest, maxsplit=1)
    return library, name.strip(), dict(Spec.parse(":".join([library, *settings])).options)


def build_from_library(spec: str, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
    """Build an initialized architecture with its normalization and resizing."""
    library, name, options = parse(spec)
    settings = LibrarySettings(**convert(f"model {library}:{name!r}", LibrarySettings, options))
    needed = {"num_classes": num_classes, "in_channels": in_channels}
    for key, wanted in needed.items():
        if (given := getattr(settings, key)) is not None:
            require_size(spec, key, given, wanted)
    settings = replace(settings, **_without_none(needed))
    try:
        model, own = LIBRARIES[library](name, settings.num_classes, settings.in_channels)
    except InputError:
        raise
    except Exception as error:  # architectures raise many kinds of exceptions
        raise InputError(f"model {spec!r} cannot be built: {one_line(error, 120)}") from error
    mean, std = {"none": ([0.0], [1.0]), "own": own, **NORMALIZATIONS}[settings.normalize]
    if len(mean) not in (1, settings.in_channels or len(own[0])):
        if settings.normalize != "own":
            raise InputError(f"normalize={settings.normalize} is for {len(mean)} channels, not {settings.in_channels}")
        mean, std = [0.0], [1.0]  # the library's normalization does not apply to other channels
    size = settings.size
    return Prepared(model, None if size is None else Resize((size, size), settings.resize), mean, std)


def published_weights(spec: str) -> Path:
    """Return the weights file that timm publishes for an architecture, from the hub or its cache."""
    library, name, _ = parse(spec)
    if library != "timm":
        raise InputError(
            f"model {spec!r} is an architecture without weights: pass --weights FILE "
            f"(those of {library} are pickles in the cache of torch)"
        )
    timm = _timm(name)
    repository = timm.get_pretrained_cfg(name).hf_hub_id
    if not repository:
        raise InputError(
            f"model {spec!r}: timm publishes no weights for it on the Hugging Face hub: pass --weights FILE"
        )
    return from_hub(repository, [WEIGHTS], lambda folder: next(folder.glob(WEIGHTS), None))


Statistics = tuple[Sequence[float], Sequence[float]]


def _build_timm(name: str, num_classes: int | None, in_channels: int | None) -> tuple[nn.Module, Statistics]:
    given = {"num_classes": num_classes, "in_chans": in_channels}
    model = _timm(name).create_model(name, pretrained=False, **_without_none(given))
    return model, (model.pretrained_cfg["mean"], model.pretrained_cfg["std"])


def _timm(name: str) -> Any:
    """Import timm and check the name, because timm would also load repositories and folders."""
    timm = optional("timm", "timm")
    if not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", name) or not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)  # there are more than a thousand names
        hint = f": did you mean {', '.join(close)}?" if close else ""
        raise InputError(f"timm has no model {name!r}{hint}")
    return timm


def _build_torchvision(name: str, num_classes: int | None, in_channels: int | None) -> tuple[nn.Module, Statistics]:
    models = optional("torchvision.models", "torchvision")
    if name not in models.list_models(module=models):
        raise unknown("model of torchvision", name, models.list_models(module=models))
    if in_channels not in (None, 3):
        raise InputError(f"torchvision:{name} takes images of 3 channels, but the data has {in_channels}")
    # These two warn unless the initialization is chosen explicitly.
    given = {"num_classes": num_classes, "init_weights": True if name in ("googlenet", "inception_v3") else None}
    return models.get_model(name, weights=None, **_without_none(given)), NORMALIZATIONS["imagenet"]


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


LIBRARIES: dict[str, Callable[[str, int | None, int | None], tuple[nn.Module, Statistics]]] = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
}
"""The builder of each library: from name, classes and channels to a model with its mean and standard deviation."""
