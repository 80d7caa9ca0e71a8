"""Reader of weights files that others wrote: safetensors, and pickles of tensors and plain values.

Written by hand because the files may be hostile: nothing in a file is ever executed, and sizes are checked before
memory is allocated. torch's restricted unpickler reads pickles, after ``check_unfolding`` has bounded their expansion.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import safetensors.torch
import torch
from torch import Tensor

from classwise.core.errors import InputError, one_line

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
"""Keys under which training scripts keep the weights. The first one present wins: weights before averages."""

LEGACY_PICKLES = 5
"""In the older format: a magic number, the version, the machine, what was saved, and the keys of its storages."""

MOST = 10_000_000
"""Values that one value of a pickle may stand for; a state dict with its optimizer has some ten thousands."""


class Stored(NamedTuple):
    """What a file holds."""

    state: dict[str, Tensor]
    notes: list[str]
    """What was taken off to get at it."""


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a weights file by name, as they are stored, out of the wrappers in ``WRAPPERS``.

    ``.safetensors``, or ``.pt``, ``.pth``, ``.ckpt`` and ``.tar`` of ``torch.save``. Pickles are read by
    torch's restricted unpickler only; one that needs more than tensors and plain values is refused.
    """
    return read_file(Path(path)).state


def read_file(path: Path) -> Stored:
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"weights {str(path)!r}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"weights {str(path)!r}: no such file")
    loaded: Any
    try:
        loaded = (safetensors.torch.load_file if path.suffix.lower() == ".safetensors" else _unpickled)(path)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wanted is None:
            raise InputError(f"{path} is damaged or not a file of weights") from error
        raise InputError(
            f"{path} is refused: reading it would run {wanted[1]}; save the state dict alone instead"
        ) from error
    # What a damaged or hostile file raises depends on where the reader stumbles: OSError, EOFError, KeyError,
    # RuntimeError, SafetensorError, ...
    except Exception as error:
        raise InputError(f"{path} is damaged or not a file of weights: {one_line(error, 120)}") from error
    return _tensors(path, loaded)


def _unpickled(path: Path) -> Any:
    """What ``torch.save`` wrote, by torch's restricted unpickler."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # as torch tells the two formats apart
        file.seek(0)
        if not is_zip:
            for _ in range(LEGACY_PICKLES):
                check_unfolding(path, file)
    if is_zip:
        _check_archive(path)
    with warnings.catch_warnings():
        # Remarks on odd pickles, addressed to the author of the file.
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _check_archive(path: Path) -> None:
    """Refuse what ``torch.save`` never writes: programs, paths out of the archive, and entries that grow when read."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _check_entries(path, entries)
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as file:
                    check_unfolding(path, cast(BinaryIO, file))


def _check_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    if any(entry.filename.split("/")[1:] == ["constants.pkl"] for entry in entries):
        raise InputError(
            f"{path} is a TorchScript program, not weights: as a model it is torchscript:{path} with --trust"
        )
    size = path.stat().st_size
    for entry in entries:
        parts = entry.filename.replace("\\", "/").split("/")
        if ".." in parts or not parts[0]:
            raise InputError(f"{path} is refused: its entry {quoted(entry.filename)} leads out of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise InputError(f"{path} is refused: its entry {quoted(entry.filename)} grows when it is read")
    if sum(entry.file_size for entry in entries) > size:
        raise InputError(f"{path} is refused: its entries overlap")


def _tensors(path: Path, loaded: Any) -> Stored:
    """The state dict in what a file held."""
    wrappers: list[str] = []
    for _ in WRAPPERS:  # wrappers may be nested; no file needs more levels than there are names
        if not isinstance(loaded, Mapping) or all(isinstance(value, Tensor) for value in loaded.values()):
            break
        key = next((key for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if key is None:
            break
        loaded = loaded[key]
        wrappers.append(key)
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path} holds {type(loaded).__name__}; expected a state dict")
    if not loaded:
        raise InputError(f"{path} holds no weights")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path}: {quoted(name)} is {type(value).__name__}; expected a state dict, plain or under "
                + ", ".join(WRAPPERS[:4])
            )
        if not _is_dense(value):
            raise InputError(f"{path}: {quoted(name)} is not a dense tensor")
    notes = [f"taken out of {' > '.join(map(repr, wrappers))}"] if wrappers else []
    return Stored({name: value.detach() for name, value in loaded.items()}, notes)


def _is_dense(value: Tensor) -> bool:
    """Whether every element is there: sparse, meta and expanded tensors claim any shape in a few bytes."""
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_unfolding(path: Path, stream: BinaryIO) -> None:
    """Read a pickle of a file up to its end, and refuse what stands for too much; what is no pickle raises anything."""
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
            if pickletools.stackslice in taken:  # everything above the last mark, and what is said to lie below it
                depth = marks.pop() - taken.index(pickletools.markobject)
            if depth < 0:
                raise ValueError("takes more from its stack than there is")
            size = 1 + sum(stack[depth:])
            if size > MOST:
                raise InputError(f"{path} is refused: it is a pickle that unfolds without end")
            stack[depth:] = [size] * len(opcode.stack_after)


def quoted(name: object) -> str:
    """A name out of a file, which may be anything: on one line and not too long."""
    text = repr(name) if isinstance(name, str) else f"a key of type {type(name).__name__}"
    return text if len(text) <= 100 else text[:100] + "..."
