"""The cache on disk: images decoded once, memory-mapped ever after, checked whenever they are opened."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from classwise.data.arrays import ImageSet
from classwise.data.sources import Source
from classwise.files import digest_json
from classwise.progress import SILENT, Progress


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


def materialise(source: Source, progress: Progress = SILENT) -> ImageSet:
    """A source's images, memory-mapped from the cache, which is filled or mended as needed.

    One entry is one directory; it appears whole, by a rename, so that processes may build it side by side.
    What was changed since it was written is noticed by size and checksum and built again. Where nothing can
    be written, the images stay in memory.
    """
    cache = cache_directory()
    if cache is None:
        return source.read(progress)
    prefix = f"{_slug(source.name)}-{_slug(source.split)}-"
    entry = cache / f"{prefix}{source.fingerprint()}"
    found = _open_entry(entry, source)
    if found is None:
        built = source.read(progress)
        try:
            _write_entry(entry, built)
            _remove_stale(entry, prefix)
        except OSError:
            return built
        # Another process may be exchanging the entry this very moment; then our own copy serves as well.
        found = _open_entry(entry, source) or built
    return found


def _slug(name: str) -> str:
    """A name as part of a file name; long ones keep their end, where paths differ."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-80:]


def _open_entry(entry: Path, source: Source | ImageSet) -> ImageSet | None:
    """An entry's images, or None where it is absent or not what was written."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        seal = meta.pop("seal")
        if seal != digest_json(meta):
            return None
        for name in ("images", "labels"):
            if _measure(entry / f"{name}.npy") != meta["files"][name]:
                return None
        images = np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(entry / "labels.npy", allow_pickle=False)
        if list(images.shape) != meta["shape"] or images.dtype.str != meta["dtype"]:
            return None
        classes = None if meta["classes"] is None else tuple(meta["classes"])
        return ImageSet(name=source.name, split=source.split, images=images, labels=labels, classes=classes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_entry(entry: Path, built: ImageSet) -> None:
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}")
    temporary.mkdir(parents=True)
    try:
        files: dict[str, Any] = {}
        for name, array in (("images", built.images), ("labels", built.labels)):
            with (temporary / f"{name}.npy").open("xb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            files[name] = _measure(temporary / f"{name}.npy")
        meta = {
            "shape": list(built.images.shape),
            "dtype": built.images.dtype.str,
            "files": files,
            "classes": None if built.classes is None else list(built.classes),
        }
        with (temporary / "meta.json").open("x", encoding="utf-8") as text:
            json.dump({**meta, "seal": digest_json(meta)}, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        try:
            temporary.rename(entry)
        except OSError:
            # Nothing can be renamed over a directory with files. If another process was faster, its entry is
            # as good as ours; a damaged one makes room.
            if _open_entry(entry, built) is None:
                _discard(entry)
                temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _measure(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return {"size": file.tell(), "crc32": checksum}


def _discard(entry: Path) -> None:
    """Remove an entry so that nobody sees half of it."""
    doomed = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}")
    try:
        entry.rename(doomed)
    except FileNotFoundError:
        return  # someone else was faster
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(entry: Path, prefix: str) -> None:
    """Remove what earlier versions of the same data left, and what interrupted writers left a day ago."""
    version = re.compile(re.escape(prefix) + r"[0-9a-f]+")
    leftover = re.compile(r"\." + re.escape(prefix) + r"[0-9a-f]+\.[0-9a-f]+")
    for other in list(entry.parent.iterdir()):
        if other == entry:
            continue
        if version.fullmatch(other.name):
            _discard(other)
        elif leftover.fullmatch(other.name):
            try:
                old = time.time() - other.stat().st_mtime > 24 * 3600
            except OSError:
                continue
            if old:
                shutil.rmtree(other, ignore_errors=True)
