"""Where data lie: the folder CLASSWISE_DATA names, what ``classwise data prepare`` was shown, and our own cache."""

from __future__ import annotations

import os
from pathlib import Path

from classwise.core.errors import InputError
from classwise.storage.files import read_json, write_json


def data_directory() -> Path | None:
    """The folder that holds data sets: CLASSWISE_DATA."""
    if not (given := os.environ.get("CLASSWISE_DATA")):
        return None
    if not (folder := Path(given).expanduser()).is_dir():
        raise InputError(f"CLASSWISE_DATA = {given!r} is not a folder")
    return folder


def cache_directory() -> Path | None:
    """Where decoded data sets are kept: CLASSWISE_CACHE, else the user's cache; None without a home."""
    if chosen := os.environ.get("CLASSWISE_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "classwise"
    try:
        return Path.home() / ".cache" / "classwise"
    except RuntimeError:
        return None


def remember(dataset: str, folder: Path) -> None:
    """Note where a data set lies, for every later use of its name."""
    if (note := _note(dataset)) is None:
        raise InputError("there is no place to note where the data lie: set CLASSWISE_CACHE to a folder")
    try:
        write_json(note, {"folder": str(folder.resolve())})
    except OSError as error:
        raise InputError(f"cannot write {note}: {error.strerror}; set CLASSWISE_CACHE to another folder") from error


def remembered(dataset: str) -> Path | None:
    """Where a data set was said to lie."""
    note = _note(dataset)
    if note is None or not note.is_file():
        return None
    found = read_json(note)
    folder = found.get("folder") if isinstance(found, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_dir():
        where = folder if isinstance(folder, str) else "nowhere"
        again = f"run classwise data prepare {dataset} --from DIR again, or delete {note}"
        raise InputError(f"{dataset} was prepared from {where}, which is no folder any more: {again}")
    return Path(folder)


def _note(dataset: str) -> Path | None:
    cache = cache_directory()
    return None if cache is None else cache / "from" / f"{dataset}.json"
