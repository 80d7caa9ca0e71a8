"""Pickles that hold arrays, and nothing that could run.

A pickle is a program. This reader knows the plain values (numbers, text, lists, dictionaries) and the names by which
arrays and bytes are written, for which it puts classes of its own; asked for any other name it stops. No code of
numpy's or of anybody's is reached from the file, and nothing is allocated that the file does not hold.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from classwise.core.errors import InputError, one_line

MAX_BYTES = 2**30
"""Larger files are refused: the largest published one has 155 MB."""


def read_pickle(file: Path) -> Any:
    """What a pickle of plain values and uint8 arrays holds; text of Python 2 comes as bytes."""
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise InputError(f"{size} bytes, more than {MAX_BYTES}")
        return _plain(_Reader(io.BytesIO(file.read_bytes()), encoding="bytes").load())
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise InputError(f"{file}: not a readable pickle: {one_line(error)}") from error


class _Dtype:
    """What stands for numpy.dtype: its text alone."""

    __slots__ = ("text",)

    def __init__(self, text: Any, *_: Any) -> None:
        self.text = text.decode("latin-1") if isinstance(text, bytes) else text

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which a byte has not


class _Array:
    """What stands for an array while it is read."""

    __slots__ = ("found",)

    def __init__(self, *_: Any) -> None:
        self.found: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.text not in ("u1", "|u1") or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array that is not of bytes")
        self.found = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _Bytes:
    """What stands for _codecs.encode, by which Python 3 writes bytes so that Python 2 can read them.

    A class as the others are: to a function, a file could attach something.
    """

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any) -> Any:
        if encoding != "latin1" or not isinstance(text, str):
            raise pickle.UnpicklingError("bytes in an unknown encoding")
        return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _Bytes,
}


class _Reader(pickle._Unpickler):
    """The reader written in Python: the one in C sets aside as much memory as a file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise InputError(f"refused: it names {module}.{name}, and data must not bring code")
        return _KNOWN[module, name]


def _plain(value: Any) -> Any:
    """The arrays in place of what stood for them; only at the top, where published files have them."""
    if isinstance(value, dict):
        return {key: entry.found if isinstance(entry, _Array) else entry for key, entry in value.items()}
    return value
