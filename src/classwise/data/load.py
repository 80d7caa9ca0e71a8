"""One door for all data: a spec, arrays, a Dataset or a DataLoader becomes an ImageSet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from classwise.data.arrays import ImageSet
from classwise.data.cache import materialise
from classwise.data.cards import DATASETS
from classwise.data.convert import as_image_set
from classwise.data.sources import Digits, Factory, Folder, HubParquet, Source
from classwise.errors import InputError, unknown
from classwise.plugins import is_attribute_spec
from classwise.progress import SILENT, Progress


def load_data(
    data: Any, *, split: str = "test", classes: Sequence[str] | None = None, progress: Progress = SILENT
) -> ImageSet:
    """Read labelled images from wherever they are.

    ``data`` is a registered name, ``folder:PATH``, ``package.module:factory``, ``path/to/file.py:factory``,
    or an ImageSet, a Dataset, a DataLoader or a pair of images and labels. ``split`` chooses among the parts
    of a named data set; data given as an object is taken whole, under that name. ``classes`` overrides the
    class names.
    """
    if isinstance(data, str | os.PathLike):
        source = source_of(os.fspath(data) if isinstance(data, str) else f"folder:{os.fspath(data)}", split)
        # The user's own code may do anything at any time, so what it returns is not kept.
        found = source.read() if isinstance(source, Factory) else materialise(source, progress)
        return found if classes is None else replace(found, classes=tuple(classes))
    name = "arrays" if isinstance(data, tuple | list) else type(getattr(data, "dataset", data)).__name__
    return as_image_set(data, name=name, split=split, classes=classes)


def source_of(spec: str, split: str) -> Source:
    """The source that a spec names, without reading it."""
    if spec in DATASETS:
        card = DATASETS[spec]
        if split not in card.splits:
            raise unknown(f"split of {spec}", split, card.splits)
        return Digits(split) if card.hub is None else HubParquet(card, split)
    kind, _, path = spec.partition(":")
    if kind == "folder" and path:
        return Folder(Path(path).expanduser(), split)
    if is_attribute_spec(spec):
        return Factory(spec, split)
    if spec and Path(spec).is_dir():
        raise InputError(f"data {spec!r} is a folder; write folder:{spec}")
    raise unknown("data set", spec, [*DATASETS, "folder:PATH", "package.module:factory"])
