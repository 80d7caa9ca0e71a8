"""The cache on disk: images are decoded once, memory-mapped afterwards and verified whenever they are opened."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.data.arrays import ImageSet
from classwise.data.directories import cache_directory
from classwise.data.sources import Source, collect, walk
from classwise.storage.files import digest_json

IN_MEMORY = 4 * 2**30
"""The largest data set that is read into memory if the cache cannot be written."""


def materialize(source: Source, progress: Progress = SILENT) -> ImageSet:
    """Return the images of a source, memory-mapped from the cache; missing or damaged entries are built.

    An entry is a directory that is created by an atomic rename, so that several processes can build it at once.
    Damage is detected by size and checksum. If the cache cannot be written, the images are kept in memory.
    """
    cache = cache_directory()
    if cache is None:
        return _in_memory(source, "there is no home directory for the cache", progress)
    prefix = f"{_slug(source.name)}-{_slug(source.split)}-"
    entry = cache / f"{prefix}{source.fingerprint()}"
    found = _open_entry(entry, source)
    if found is None:
        try:
            _write_entry(entry, source, progress)
            _remove_stale(entry, prefix)
        except OSError as error:
            return _in_memory(source, f"{cache}: {error.strerror or error}", progress)
        # Another process may have replaced the entry in the meantime.
        found = _open_entry(entry, source) or _in_memory(source, f"{entry} was replaced while it was read", progress)
    return found


def _in_memory(source: Source, why: str, progress: Progress) -> ImageSet:
    reading = source.open()
    if (size := reading.count * math.prod(reading.shape)) > IN_MEMORY:
        raise InputError(
            f"{source.name}/{source.split} takes {size / 2**30:.1f} GiB and cannot be cached on disk ({why}): "
            "set CLASSWISE_CACHE to a writable folder with enough space"
        )
    return collect(source, reading, progress)


def _slug(name: str) -> str:
    """Return a name as part of a file name; long names keep their end, where paths differ."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-80:]


def _open_entry(entry: Path, source: Source | ImageSet) -> ImageSet | None:
    """Return the images of an entry, or None if it is absent or damaged."""
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
        return ImageSet(
            name=source.name, split=source.split, images=images, labels=labels, classes=tuple(meta["classes"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_entry(entry: Path, source: Source, progress: Progress) -> None:
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}")
    temporary.mkdir(parents=True)
    try:
        reading = source.open()
        shape = (reading.count, *reading.shape)
        if math.prod(shape) > shutil.disk_usage(temporary).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        labels = np.empty(reading.count, dtype=np.int64)
        with _written(temporary / "images.npy") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for part, (pixels, numbers) in walk(source, reading, progress):
                file.write(np.ascontiguousarray(pixels).data)
                labels[part] = numbers
        with _written(temporary / "labels.npy") as file:
            np.save(file, labels, allow_pickle=False)
        images = np.load(temporary / "images.npy", mmap_mode="r", allow_pickle=False)
        built = ImageSet(
            name=source.name, split=source.split, images=images, labels=labels, classes=reading.classes
        )  # raises before an invalid entry is kept
        meta = {
            "shape": list(shape),
            "dtype": images.dtype.str,
            "files": {name: _measure(temporary / f"{name}.npy") for name in ("images", "labels")},
            "classes": list(reading.classes),
        }
        with _written(temporary / "meta.json") as file:
            file.write(json.dumps({**meta, "seal": digest_json(meta)}, indent=1).encode())
        try:
            temporary.rename(entry)
        except OSError:
            # A directory with files cannot be replaced by a rename. An entry that another process built in the meantime
            # is as good as ours; a damaged one is removed.
            if _open_entry(entry, built) is None:
                _discard(entry)
                temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is flushed to disk when it is closed."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _measure(path: Path) -> dict[str, int]:
    """Return the size and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return {"size": file.tell(), "crc32": checksum}


def _discard(entry: Path) -> None:
    """Remove an entry atomically."""
    doomed = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}")
    try:
        entry.rename(doomed)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(entry: Path, prefix: str) -> None:
    """Remove the entries of earlier versions of the same data, and what interrupted writers left over a day ago."""
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
