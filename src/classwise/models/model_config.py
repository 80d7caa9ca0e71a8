"""Directories that ``classwise export`` writes: ``config.json`` says what a model is, ``model.safetensors`` has it."""

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
"""Bytes; the longest class names of a thousand classes need a tenth."""


class Normalization(BaseModel):
    """What is subtracted and divided by, channel by channel; it is among the weights too."""

    mean: list[float]
    std: list[float]


class TrainedFor(BaseModel):
    """The threat a model was trained against."""

    norm: str
    eps: str


class ModelConfig(BaseModel):
    """What ``config.json`` says of an exported model."""

    model_config = ConfigDict(frozen=True)

    schema_: Literal["classwise/model/1"] = Field("classwise/model/1", alias="schema")
    architecture: str
    """A spec: a registered name, or one of timm or torchvision, with settings."""
    num_classes: Count
    in_channels: Count
    classes: list[str]
    normalization: Normalization | None = None
    trained_for: TrainedFor | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a model, whoever wrote it."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} holds no {CONFIG}: it is not the directory of a model")
    if path.stat().st_size > LARGEST_CONFIG:
        raise InputError(f"{path} is far too large for the configuration of a model")
    try:
        content = read_json(path)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not the configuration of a model: expected an object")
    return content


def exported(folder: Path, content: dict[str, Any]) -> ModelConfig | None:
    """The configuration as ours; None where it is another's."""
    if content.get("schema") != SCHEMA:
        return None
    try:
        config = ModelConfig.model_validate(content)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(f"{folder / CONFIG}: {where[:80]}: {first_line(error)}") from None
    if len(config.classes) != config.num_classes:
        raise InputError(f"{folder / CONFIG} names {len(config.classes)} classes of {config.num_classes}")
    return config
