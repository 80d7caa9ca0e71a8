"""Files that are either whole or absent, and digests that tell whether two things are the same."""

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
    """Yield a temporary path beside ``path``; on success it is synced to disk and renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes files private; what we write is as public as the user's umask says.
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
    """Write a JSON file atomically. NaN is refused: an absent number is null."""
    write_text(path, json_text(value) + "\n")


def json_text(value: Any, margin: str = "\n") -> str:
    """JSON to be read: an entry a line, but a list of plain values on one, as a row of a matrix.

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
    """Read a JSON file; a missing or torn one is a user's error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except ValueError as error:  # no JSON, no text, or a number with thousands of digits
        raise InputError(f"{path} is not readable JSON: {error}") from None


def digest(*parts: bytes | memoryview | str) -> str:
    """A short stable fingerprint of the parts, in order.

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
    """The fingerprint of a JSON value, whatever the order of its keys."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))
