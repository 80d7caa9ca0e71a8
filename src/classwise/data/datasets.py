"""The data sets known by name: the cards in ``datasets.toml``, read on first use."""

from __future__ import annotations

import tomllib
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    """What is needed to read a data set."""

    name: str
    hub: str | None = None
    """``org/name`` on the Hugging Face hub; None for the data set that comes with scikit-learn."""
    image_columns: tuple[str, ...] = ("image",)
    """Possible names of the image column; the first one present is used."""
    label_column: str = "label"
    classes: tuple[str, ...]
    wnids: tuple[str, ...] = ()
    """The WordNet id of each class, for data sets whose folders are named by them."""
    mode: Literal["L", "RGB"]
    size: tuple[int, int]
    """Height and width of every image."""
    resize: int | None = None
    """For images of different sizes: the length to which the shorter side is resized before the center crop."""
    superclasses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The labels of each superclass."""
    folder: str = ""
    """The subfolder (configuration on the hub) to read; required if several contain files of one split."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",), "test": ("test",)})
    """Our split names and the names their files may have, in order of preference."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return len(self.mode), *self.size


@cache
def imagenet_classes() -> Mapping[str, str]:
    """The class names of ImageNet (ILSVRC 2012) by WordNet id, in the order of their labels.

    The ids are sorted, and the names are those of torchvision's weights. They include the classes of Tiny-ImageNet.
    """
    return dict(line.split(" ", 1) for line in _package_file("imagenet_classes.txt").splitlines())


class _Registry(UserDict[str, DatasetCard]):
    """The cards by name; further ones can be added."""

    def __init__(self) -> None:
        pass  # UserDict would set ``data``

    @cached_property
    def data(self) -> dict[str, DatasetCard]:  # type: ignore[override]
        entries = tomllib.loads(_package_file("datasets.toml"))
        return {name: _card(name, entry) for name, entry in entries.items()}


DATASETS = _Registry()


def _card(name: str, entry: dict[str, Any]) -> DatasetCard:
    if "wnids" in entry:
        names = imagenet_classes()
        entry["wnids"] = list(names) if entry["wnids"] == "all" else entry["wnids"]
        entry["classes"] = [names[wnid] for wnid in entry["wnids"]]
    groups = entry.pop("superclasses", {})
    superclasses = {group: tuple(map(entry["classes"].index, names)) for group, names in groups.items()}
    if "splits" in entry:
        entry["splits"] = {split: tuple(names) for split, names in entry["splits"].items()}
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return DatasetCard(name=name, superclasses=superclasses, **fields)


def _package_file(name: str) -> str:
    return (resources.files("classwise.data") / name).read_text(encoding="utf-8")
