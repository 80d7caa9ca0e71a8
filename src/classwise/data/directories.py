"""Directories of data: CLASSWISE_DATA, the folders given to ``classwise data prepare``, and the cache."""

from __future__ import annotations

import os
from pathlib import Path

from classwise.core.errors import InputError
from classwise.storage.files import read_json, write_json


def data_directory() -> Path | None:
    """Return the folder of data sets that CLASSWISE_DATA names, if it is set."""
    if not (given := os.environ.get("CLASSWISE_DATA")):
        return None
    if not (folder := Path(given).expanduser()).is_dir():
        raise InputError(f"CLASSWISE_DATA = {given!r} is not a folder: set it to one, or unset it")
    return folder


def cache_directory() -> Path | None:
    """Return the cache of decoded data sets: CLASSWISE_CACHE, else the user's cache; None without a home directory."""
    if chosen := os.environ.get("CLASSWISE_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "classwise"
    try:
        return Path.home() / ".cache" / "classwise"
    except RuntimeError:
        return None


def remember(dataset: str, folder: Path) -> None:
    """Record the folder of a data set, so that its name refers to this folder from now on."""
    if (note := _note(dataset)) is None:
        raise InputError(
            "the folder cannot be recorded without a home directory: set CLASSWISE_CACHE to a writable folder"
        )
    try:
        write_json(note, {"folder": str(folder.resolve())})
    except OSError as error:
        raise InputError(f"cannot write {note}: {error.strerror}; set CLASSWISE_CACHE to another folder") from error


def remembered(dataset: str) -> Path | None:
    """Return the recorded folder of a data set, if there is one."""
    note = _note(dataset)
    if note is None or not note.is_file():
        return None
    found = read_json(note)
    folder = found.get("folder") if isinstance(found, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_dir():
        again = f"run classwise data prepare {dataset} --from DIR again, or delete {note}"
        raise InputError(f"{dataset} was prepared from {folder!r}, which is no longer a folder: {again}")
    return Path(folder)


def _note(dataset: str) -> Path | None:
    cache = cache_directory()
    return None if cache is None else cache / "from" / f"{dataset}.json"
