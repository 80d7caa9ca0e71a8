"""Architectures of other packages: ``timm:NAME`` and ``torchvision:NAME``, with settings after a comma.

The packages are asked for an architecture only. Weights come from a file, or for timm from its repository on the
Hugging Face hub, always as tensors: neither package's own download, which unpickles, is used.
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
from classwise.models.hub import fetch
from classwise.models.model_config import WEIGHTS
from classwise.models.normalize import NORMALIZATIONS
from classwise.models.optional_packages import optional
from classwise.models.preprocess import Prepared, Resize
from classwise.models.settings import Count, Normalization


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooSettings:
    """What every architecture of a zoo takes."""

    num_classes: Count | None = None
    in_channels: Count | None = None
    normalize: Normalization | Literal["none", "own"] = "own"
    """``own`` is what the zoo's own weights were trained with."""
    size: Count | None = None
    """Images are resized to so many pixels a side; where it is not given they go in as they are."""
    resize: Literal["nearest", "bilinear", "bicubic"] = "bilinear"


def is_zoo(spec: str) -> bool:
    """Whether a spec names an architecture of another package.

    >>> is_zoo("timm:resnet18"), is_zoo("resnet18")
    (True, False)
    """
    return spec.partition(":")[0] in ZOOS


def parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """The zoo, the name and the settings in a spec. A recipe joins settings by a colon.

    >>> parse("timm:resnet18.a1_in1k,size=64"), parse("torchvision:vgg16:size=64,resize=nearest")
    (('timm', 'resnet18.a1_in1k', {'size': '64'}), ('torchvision', 'vgg16', {'size': '64', 'resize': 'nearest'}))
    """
    zoo, _, rest = spec.partition(":")
    name, *settings = re.split("[,:]", rest, maxsplit=1)
    return zoo, name.strip(), dict(Spec.parse(":".join([zoo, *settings])).options)


def build_zoo(spec: str, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
    """The architecture, freshly initialized, with its normalization and its size of images inside."""
    zoo, name, options = parse(spec)
    settings = ZooSettings(**convert(f"model {zoo}:{name!r}", ZooSettings, options))
    needed = {"num_classes": num_classes, "in_channels": in_channels}
    for key, wanted in needed.items():
        if wanted is not None and getattr(settings, key) not in (None, wanted):
            raise InputError(f"model {spec!r}: {key}={getattr(settings, key)}, but {wanted} are needed")
    settings = replace(settings, **_without_none(needed))
    try:
        model, own = ZOOS[zoo](name, settings.num_classes, settings.in_channels)
    except InputError:
        raise
    except Exception as error:  # every architecture of a stranger fails in its own way
        raise InputError(f"model {spec!r} cannot be built: {one_line(error, 120)}") from error
    mean, std = {"none": ([0.0], [1.0]), "own": own, **NORMALIZATIONS}[settings.normalize]
    if len(mean) not in (1, settings.in_channels or len(own[0])):
        if settings.normalize != "own":
            raise InputError(f"normalize={settings.normalize} is for {len(mean)} channels, not {settings.in_channels}")
        mean, std = [0.0], [1.0]  # what the zoo's weights were trained with says nothing of other channels
    size = settings.size
    return Prepared(model, None if size is None else Resize((size, size), settings.resize), mean, std)


def published_weights(spec: str) -> Path:
    """The file of the weights that timm publishes for an architecture, from the hub or its cache."""
    zoo, name, _ = parse(spec)
    if zoo != "timm":
        raise InputError(
            f"model {spec!r} is an architecture without weights: give its weights file too "
            f"(those of {zoo} itself are pickles in the cache of torch)"
        )
    timm = _timm(name)
    repository = timm.get_pretrained_cfg(name).hf_hub_id
    if not repository:
        raise InputError(f"model {spec!r}: timm publishes no weights for it on the Hugging Face hub: give a file")
    return fetch(repository, None, [WEIGHTS], lambda folder: (folder / WEIGHTS).is_file()) / WEIGHTS


Statistics = tuple[Sequence[float], Sequence[float]]


def _build_timm(name: str, num_classes: int | None, in_channels: int | None) -> tuple[nn.Module, Statistics]:
    given = {"num_classes": num_classes, "in_chans": in_channels}
    model = _timm(name).create_model(name, pretrained=False, **_without_none(given))
    return model, (model.pretrained_cfg["mean"], model.pretrained_cfg["std"])


def _timm(name: str) -> Any:
    """timm, after making sure that it knows the name: it would also take addresses of repositories and folders."""
    timm = optional("timm", "timm")
    if not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", name) or not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)  # of more than a thousand names
        hint = f": did you mean {', '.join(close)}?" if close else ""
        raise InputError(f"timm has no model {name!r}{hint}")
    return timm


def _build_torchvision(name: str, num_classes: int | None, in_channels: int | None) -> tuple[nn.Module, Statistics]:
    models = optional("torchvision.models", "torchvision")
    if name not in models.list_models(module=models):
        raise unknown("model of torchvision", name, models.list_models(module=models))
    if in_channels not in (None, 3):
        raise InputError(f"torchvision:{name} takes images of 3 channels, the data has {in_channels}")
    # These two warn where nobody says whether their weights should be drawn.
    given = {"num_classes": num_classes, "init_weights": True if name in ("googlenet", "inception_v3") else None}
    return models.get_model(name, weights=None, **_without_none(given)), NORMALIZATIONS["imagenet"]


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


ZOOS: dict[str, Callable[[str, int | None, int | None], tuple[nn.Module, Statistics]]] = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
}
"""By the prefix of their specs: name, classes and channels to a model and its mean and deviation of each channel."""
