"""Atomic files, JSON, and digests."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from classwise.core.errors import InputError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success, sync the file to disk and rename it to ``path``."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; pass the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        # mkstemp creates private files; apply the user's umask instead.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. NaN raises ValueError: missing numbers are null."""
    write_text(path, json_text(value) + "\n")


def json_text(value: Any, margin: str = "\n") -> str:
    """Format JSON with one entry per line, and lists of plain values on a single line.

    >>> print(json_text({"a": [[1, 0], [0, 2]], "b": []}))
    {
     "a": [
      [1, 0],
      [0, 2]
     ],
     "b": []
    }
    """
    inner = margin + " "
    if isinstance(value, Mapping) and value:
        entries = (
            f"{json.dumps(str(key), ensure_ascii=False)}: {json_text(entry, inner)}" for key, entry in value.items()
        )
        return f"{{{inner}{f',{inner}'.join(entries)}{margin}}}"
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple) for entry in value):
        return f"[{inner}{f',{inner}'.join(json_text(entry, inner) for entry in value)}{margin}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def read_json(path: Path) -> Any:
    """Read a JSON file; raises InputError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except ValueError as error:  # invalid JSON, invalid text, or a number with thousands of digits
        raise InputError(f"{path} is not readable JSON: {error}") from None


def digest(*parts: bytes | memoryview | str) -> str:
    """Return a short, stable hash of the parts in order.

    >>> digest("a", b"b") == digest("a", "b") != digest("ab")
    True
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = memoryview(part.encode() if isinstance(part, str) else part)
        hasher.update(data.nbytes.to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def digest_json(value: Any) -> str:
    """Return the digest of a JSON value, independent of the order of keys."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))
