"""A reader of pickles that contain only plain values and uint8 arrays.

Pickles can execute code. This reader resolves only the names under which numpy arrays and bytes are stored, maps them
to its own classes, and refuses all others. No other code is reachable, and memory is bounded by the size of the file.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from classwise.core.errors import InputError, one_line

MAX_BYTES = 2**30
"""Larger files are refused; the largest published one has 155 MB."""


def read_pickle(file: Path) -> Any:
    """Read a pickle of plain values and uint8 arrays; Python 2 strings are returned as bytes."""
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise InputError(f"{size} bytes; expected at most {MAX_BYTES}")
        return _plain(_Reader(io.BytesIO(file.read_bytes()), encoding="bytes").load())
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except Exception as error:  # damaged pickles raise many kinds of exceptions
        raise InputError(f"{file}: not a readable pickle: {one_line(error)}") from error


class _Dtype:
    """Replaces numpy.dtype; keeps its string."""

    __slots__ = ("text",)

    def __init__(self, text: Any, *_: Any) -> None:
        self.text = text.decode("latin-1") if isinstance(text, bytes) else text

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment are irrelevant for bytes


class _Array:
    """Replaces numpy.ndarray while a file is read."""

    __slots__ = ("found",)

    def __init__(self, *_: Any) -> None:
        self.found: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.text not in ("u1", "|u1") or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array with a type other than uint8")
        self.found = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _Bytes:
    """Replaces _codecs.encode, by which Python 3 writes bytes in old protocols.

    A class with slots, because a pickle could set attributes on a function.
    """

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any) -> Any:
        if encoding != "latin1" or not isinstance(text, str):
            raise pickle.UnpicklingError("bytes in an encoding other than latin1")
        return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _Bytes,
}


class _Reader(pickle._Unpickler):
    """Based on the Python implementation, because the one in C allocates as much memory as a file requests."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise InputError(f"refused: it would run {module}.{name}; data files must not contain code")
        return _KNOWN[module, name]


def _plain(value: Any) -> Any:
    """Replace the stand-ins for arrays by the arrays, at the top level only, as in the published files."""
    if isinstance(value, dict):
        return {key: entry.found if isinstance(entry, _Array) else entry for key, entry in value.items()}
    return value
