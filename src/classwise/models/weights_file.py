"""Reader of third-party weights files: safetensors, and pickles of tensors and plain values.

The files are untrusted: nothing in a file is ever executed, and sizes are checked before memory is allocated. torch's
restricted unpickler reads pickles, after ``check_unfolding`` has bounded their expansion.
"""

from __future__ import annotations

import logging
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import safetensors.torch
import torch
from torch import Tensor

from classwise.core.errors import InputError

_LOG = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar")

WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "model_ema",
    "ema",
    "state_dict_ema",
    "ema_state_dict",
    "ema_model_state_dict",
)
"""Keys under which training scripts store the weights. The first one present is used: weights before averages."""

LEGACY_PICKLES = 5
"""The pickles in the older format: a magic number, the version, the machine, the object, and its storage keys."""

MOST = 10_000_000
"""The maximum number of values that a pickle may expand to; a state dict with its optimizer has some 10,000."""


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Read the tensors of a weights file by name, from inside the wrappers in ``WRAPPERS``.

    Accepts ``.safetensors``, and ``.pt``, ``.pth``, ``.ckpt`` and ``.tar`` of ``torch.save``. Pickles that contain more
    than tensors and plain values are refused.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"weights {str(path)!r}: expected a file with the suffix {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise InputError(f"weights {str(path)!r} is a directory; pass a file")
    if not path.is_file():
        raise InputError(f"weights {str(path)!r}: no such file")
    loaded: Any
    try:
        loaded = (safetensors.torch.load_file if path.suffix.lower() == ".safetensors" else _unpickled)(path)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged and malicious files raise many kinds of exceptions
        code = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code is None:
            raise InputError(
                f"{path} is damaged or not a weights file; expected safetensors or a state dict written by torch.save"
            ) from error
        raise InputError(
            f"{path} is refused: it contains pickled objects, and loading it would run code ({code[1]}); save "
            "model.state_dict() instead"
        ) from error
    return _tensors(path, loaded)


def _unpickled(path: Path) -> Any:
    """Read a file of ``torch.save`` by torch's restricted unpickler."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # the test by which torch distinguishes the two formats
        file.seek(0)
        if not is_zip:
            for _ in range(LEGACY_PICKLES):
                check_unfolding(path, file)
    if is_zip:
        _check_archive(path)
    with warnings.catch_warnings():
        # The warnings address the author of the file.
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _check_archive(path: Path) -> None:
    """Refuse archives that ``torch.save`` does not write: programs, outside paths, and compressed or overlapping "
    "entries."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _check_entries(path, entries)
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as file:
                    check_unfolding(path, cast(BinaryIO, file))


def _check_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    if any(entry.filename.split("/")[1:] == ["constants.pkl"] for entry in entries):
        raise InputError(f"{path} is a TorchScript program, not weights: use the model torchscript:{path} with --trust")
    size = path.stat().st_size
    for entry in entries:
        parts = entry.filename.replace("\\", "/").split("/")
        if ".." in parts or not parts[0]:
            raise InputError(f"{path} is refused: its entry {quoted(entry.filename)} is outside of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise InputError(
                f"{path} is refused: its entry {quoted(entry.filename)} is compressed or larger than the file"
            )
    if sum(entry.file_size for entry in entries) > size:
        raise InputError(f"{path} is refused: its entries overlap")


def _tensors(path: Path, loaded: Any) -> dict[str, Tensor]:
    """Extract the state dict from the content of a file."""
    wrappers: list[str] = []
    for _ in WRAPPERS:  # wrappers may be nested, at most as deep as there are names
        if not isinstance(loaded, Mapping) or all(isinstance(value, Tensor) for value in loaded.values()):
            break
        key = next((key for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if key is None:
            break
        loaded = loaded[key]
        wrappers.append(key)
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path} contains an object of type {type(loaded).__name__}; expected a state dict")
    if not loaded:
        raise InputError(f"{path} contains no weights")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path}: {quoted(name)} has type {type(value).__name__}; expected a state dict, at the top level or "
                "under " + ", ".join(WRAPPERS[:4])
            )
        if not _is_dense(value):
            raise InputError(
                f"{path}: {quoted(name)} is not a dense tensor on the CPU; sparse, quantized, meta and expanded "
                "tensors are refused"
            )
    if wrappers:
        _LOG.info("%s: read from %s", path, " > ".join(map(repr, wrappers)))
    return {name: value.detach() for name, value in loaded.items()}


def _is_dense(value: Tensor) -> bool:
    """Whether every element is stored: sparse, meta and expanded tensors can claim any shape in a few bytes."""
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_unfolding(path: Path, stream: BinaryIO) -> None:
    """Scan a pickle to its end without building anything, and refuse it if it expands to too many values.

    In a pickle of a hundred bytes, each tuple can contain the previous one twice, so that hashing or printing the
    result never ends. The scan counts, opcode by opcode, how many values each value on the stack expands to. Any
    exception may be raised if the content is not a pickle.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            taken = opcode.stack_before
            depth = len(stack) - len(taken)
            if pickletools.stackslice in taken:  # all values above the last mark, and those popped below it
                depth = marks.pop() - taken.index(pickletools.markobject)
            if depth < 0:
                raise ValueError("the stack of the pickle is empty")
            size = 1 + sum(stack[depth:])
            if size > MOST:
                raise InputError(f"{path} is refused: it is a pickle that expands to more than {MOST} values")
            stack[depth:] = [size] * len(opcode.stack_after)


def quoted(name: object) -> str:
    """Return a name from a file, which may be any object, as one short line."""
    text = repr(name) if isinstance(name, str) else f"a key of type {type(name).__name__}"
    return text if len(text) <= 100 else text[:100] + "..."
