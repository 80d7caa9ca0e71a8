"""``config.json`` of directories written by ``classwise export``; the weights are in ``model.safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classwise.config.spec import first_line
from classwise.core.errors import InputError
from classwise.models.settings import Count
from classwise.storage.files import read_json

SCHEMA = "classwise/model/1"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
LARGEST_CONFIG = 10_000_000
"""The largest configuration file in bytes; long names of a thousand classes need a tenth."""


class Normalization(BaseModel):
    """The mean and standard deviation of each channel, which are also in the weights."""

    mean: list[float]
    std: list[float]


class TrainedFor(BaseModel):
    """The threat model of adversarial training."""

    norm: str
    eps: str


class ModelConfig(BaseModel):
    """The content of ``config.json``."""

    model_config = ConfigDict(frozen=True)

    schema_: Literal["classwise/model/1"] = Field("classwise/model/1", alias="schema")
    architecture: str
    """A model spec with settings: a registered name, ``timm:NAME`` or ``torchvision:NAME``."""
    num_classes: Count
    in_channels: Count
    classes: list[str]
    normalization: Normalization | None = None
    trained_for: TrainedFor | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a model, written by us or by transformers."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} contains no {CONFIG}: it is not a model directory")
    if path.stat().st_size > LARGEST_CONFIG:
        raise InputError(f"{path} has {path.stat().st_size} bytes; a configuration has at most {LARGEST_CONFIG}")
    try:
        content = read_json(path)
    except RecursionError:
        raise InputError(f"{path}: the JSON is nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not the configuration of a model; expected a JSON object")
    return content


def exported(folder: Path, content: dict[str, Any]) -> ModelConfig | None:
    """Validate a configuration written by ``classwise export``; None if it was not."""
    if content.get("schema") != SCHEMA:
        return None
    try:
        config = ModelConfig.model_validate(content)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(f"{folder / CONFIG}: {where[:80]}: {first_line(error)}") from None
    if len(config.classes) != config.num_classes:
        raise InputError(
            f"{folder / CONFIG} has {len(config.classes)} class names; expected num_classes = {config.num_classes}"
        )
    return config
