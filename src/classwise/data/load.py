"""Loading of data: a spec, arrays, a Dataset or a DataLoader becomes an ``ImageSet``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from classwise.config.plugins import is_attribute_spec
from classwise.core.errors import InputError, unknown
from classwise.core.progress import SILENT, Progress
from classwise.data.arrays import ImageSet
from classwise.data.cache import materialize
from classwise.data.datasets import DATASETS
from classwise.data.derived import DatasetSettings, Derived
from classwise.data.directories import data_directory, remember, remembered
from classwise.data.folders import Folder
from classwise.data.layouts import find, recognize
from classwise.data.objects import Factory, as_image_set
from classwise.data.parquet import HubParquet
from classwise.data.sources import Digits, Source
from classwise.metrics.counts import Ints
from classwise.storage.run_directory import RunDirectory


def load_data(
    data: Any, *, split: str = "test", classes: Sequence[str] | None = None, progress: Progress = SILENT
) -> ImageSet:
    """Load labeled images.

    ``data`` is a data spec (a name with optional settings such as ``cifar10:without=cat``, ``folder:PATH``,
    ``parquet:PATH``, ``hf:org/name``, ``package.module:factory`` or ``path/to/file.py:factory``), a path of class
    folders, an ``ImageSet``, a Dataset, a DataLoader, or a pair of images and labels. ``split`` selects the split of a
    spec; objects are used as a whole and only named by it. ``classes`` overrides the class names.
    """
    if not isinstance(split, str):
        raise InputError(f"split must be a string such as 'test', got {split!r}")
    if isinstance(data, str | os.PathLike):
        source = source_of(os.fspath(data) if isinstance(data, str) else f"folder:{os.fspath(data)}", split)
        found = source.read() if isinstance(source, Factory) else _materialized(source, progress)
        return found if classes is None else replace(found, classes=tuple(classes))
    name = "arrays" if isinstance(data, tuple | list) else type(getattr(data, "dataset", data)).__name__
    return as_image_set(data, name=name, split=split, classes=classes)


def source_of(spec: str, split: str) -> Source | Factory:
    """Return the source of a data spec without reading it."""
    kind, _, rest = spec.partition(":")
    if kind in DATASETS and (not rest or "=" in rest):
        return _named(spec, split)
    if kind == "folder" and rest:
        folder = Path(rest).expanduser()
        return recognize(folder, split) or Folder(folder, split)
    if kind in ("parquet", "hf") and rest:
        return HubParquet.of_spec(spec, split)
    if is_attribute_spec(spec):
        return Factory(spec, split)
    if spec.endswith(".py"):
        raise InputError(f"data {spec!r}: expected a function or an object in the file, as in {spec}:make_data")
    if spec and Path(spec).is_dir():
        raise InputError(f"data {spec!r} is a folder: use folder:{spec}")
    others = ("folder:PATH", "parquet:PATH", "hf:org/name", "FILE.py:FACTORY", "package.module:factory")
    raise unknown("data set", spec, [*DATASETS, *others])


def prepare(
    spec: str, folder: Path | None = None, progress: Progress = SILENT
) -> tuple[dict[str, ImageSet], list[str]]:
    """Read all splits of a named data set into the cache, from ``folder`` if given.

    The folder is recorded for every later use of the name. Returns the splits, and an error message for each missing
    one; raises ``InputError`` if all are missing.
    """
    name = spec.partition(":")[0]
    if name not in DATASETS:
        if name in ("folder", "parquet", "hf") or is_attribute_spec(spec):
            raise InputError(f"{spec} needs no preparation: pass --data {spec} directly")
        raise unknown("data set", name, DATASETS)
    if folder is not None and DATASETS[name].hub is None:
        raise InputError(f"{name} comes with scikit-learn and is not read from a folder: leave out --from")
    if folder is not None and not folder.is_dir():
        problem = " is a file; expected a directory" if folder.exists() else ": no such directory"
        raise InputError(f"{folder}{problem}")
    found: dict[str, ImageSet] = {}
    missing: list[str] = []
    for split in DATASETS[name].splits:
        try:
            found[split] = _materialized(_named(spec, split, folder), progress)
        except InputError as error:
            missing.append(str(error))
    if not found:
        raise InputError(missing[0])
    if folder is not None:
        remember(name, folder)
    return found, missing


def validation_images(run: Path, progress: Progress = SILENT) -> tuple[ImageSet, Ints] | None:
    """Return the training set of a run and the indices of its validation images.

    None if the run had no validation images or the data set has changed since.
    """
    directory = RunDirectory(run)
    record = directory.producer()
    data = record.get("asked", {}).get("data")
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not directory.validation.is_file():
        return None
    images = load_data(name, split="train", progress=progress)
    if images.digest() != record.get("data_digest"):
        return None
    index = directory.held_out(len(images))
    return (images, index) if len(index) else None


def _materialized(source: Source, progress: Progress) -> ImageSet:
    if isinstance(source, Derived):
        materialize(source.source, progress)  # cached on its own, because reading it may take long
    return materialize(source, progress)


def _named(spec: str, split: str, folder: Path | None = None) -> Source:
    """Return the source of a registered data set: a given folder, CLASSWISE_DATA, a recorded folder, or the hub."""
    read, settings = DatasetSettings.parse(spec)
    card = settings.sized(DATASETS[read.name])
    if split not in card.splits:
        raise unknown(f"split of {read.name}", split, card.splits)
    settings.labels(card)  # raises for unknown classes before anything is read
    source: Source | None = Digits(split) if card.hub is None else None
    if folder is not None:
        source = find(card, read.name, split, folder, itself=True)
        if source is None:
            raise InputError(
                f"{folder} contains no {read.name} ({split}) in a known layout; docs/data.md lists the layouts"
            )
    if source is None and (mirror := data_directory()) is not None:
        source = find(card, read.name, split, mirror)
    if source is None and (recorded := remembered(read.name)) is not None:
        source = find(card, read.name, split, recorded, itself=True)
    if source is None:
        source = HubParquet(card, split)
    return Derived(str(read), source, card, settings) if settings.derives else source
