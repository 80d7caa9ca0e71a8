"""Weights from files that others wrote.

Weights are data: nothing in a file is ever run, whatever its suffix. Names are matched strictly, once the
few prefixes that wrappers leave in them are off. Passed over are only batch norm's and weight averaging's
counters, the block that TRADES never uses, and a normalisation that is the model's own. Every fault of a
file is one line that names the file and what is wrong in it.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from classwise.errors import InputError, one_line
from classwise.files import digest
from classwise.models.normalize import NORMALIZATIONS, Normalize

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

PREFIXES = ("module.", "_orig_mod.", "model.", "0.", "1.")
"""What DataParallel, torch.compile, wrappers and Sequential put before every name."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_MEANS = ("mean", "mu", "new_mean")

_DEVIATIONS = ("std", "sigma", "new_std")


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Fill a model with a file's weights, cast to the model's types; on an error the model is untouched."""
    path = Path(path)
    state = read_weights(path)
    normalization = _normalization_names(model)
    expected = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in normalization
    }
    if not any(map(_is_normalization, expected)):
        found = {name: state.pop(name) for name in list(state) if _is_normalization(name)}
        _check_normalization(path, found, model)
    if "n_averaged" not in expected:
        state.pop("n_averaged", None)  # the counter of torch's AveragedModel stands outside of its prefix
    filled = _rename(state, expected)
    _check_names(path, filled, expected)
    filled = {name: value for name, value in filled.items() if name in expected}
    _check_shapes(path, filled, expected, _head(model))
    cast = {name: _cast(path, name, value, expected[name]) for name, value in filled.items()}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in cast.items():
        # A mask among the buffers may hold infinities; a weight may not.
        usable = value.isfinite() if name in trained else ~value.isnan()
        if not bool(usable.all()):
            raise InputError(f"{path}: {_quote(name)} holds values that are not finite")
    model.load_state_dict({**model.state_dict(), **cast})


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a weights file by name, as they are stored, out of the wrappers in ``WRAPPERS``.

    ``.safetensors``, or ``.pt``, ``.pth``, ``.ckpt`` and ``.tar`` of ``torch.save``. Pickles are read by
    torch's restricted unpickler only; one that needs more than tensors and plain values is refused.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"weights {str(path)!r}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"weights {str(path)!r}: no such file")
    loaded: Any
    try:
        if path.suffix.lower() == ".safetensors":
            loaded = safetensors.torch.load_file(path)
        else:
            with warnings.catch_warnings():
                # Remarks on odd pickles, addressed to the author of the file.
                warnings.simplefilter("ignore")
                loaded = torch.load(path, map_location="cpu", weights_only=True)
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


def digest_model(model: nn.Module) -> str:
    """The fingerprint of a model: its class and every tensor of its state dict, whatever the device."""
    parts: list[str | memoryview] = [type(model).__name__]
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            parts += [f"{name} {tuple(value.shape)} {value.dtype}", flat.numpy().data]
    return digest(*parts)


def _tensors(path: Path, loaded: Any) -> dict[str, Tensor]:
    """The state dict in what a file held."""
    for _ in WRAPPERS:  # wrappers may be nested; no file needs more levels than there are names
        if not isinstance(loaded, Mapping) or all(isinstance(value, Tensor) for value in loaded.values()):
            break
        inner = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            break
        loaded = inner
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path} holds {type(loaded).__name__}; expected a state dict")
    if not loaded:
        raise InputError(f"{path} holds no weights")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path}: {_quote(name)} is {type(value).__name__}; expected a state dict, plain or under "
                + ", ".join(WRAPPERS[:4])
            )
        if not _is_dense(value):
            raise InputError(f"{path}: {_quote(name)} is not a dense tensor")
    return {name: value.detach() for name, value in loaded.items()}


def _is_dense(value: Tensor) -> bool:
    """Whether every element is there: sparse, meta and expanded tensors claim any shape in a few bytes."""
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _rename(state: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """The tensors under the model's names: prefixes come off, or ``model.`` on, where that fits better."""
    rest, cut = list(state), 0
    cuts = [cut]
    while prefix := next((p for p in PREFIXES if rest and all(name.startswith(p) for name in rest)), ""):
        rest = [name.removeprefix(prefix) for name in rest]
        cut += len(prefix)
        cuts.append(cut)
    renamed = [{added + name[cut:]: value for name, value in state.items()} for cut in cuts for added in ("", "model.")]
    return min(renamed, key=lambda names: len(set(expected).symmetric_difference(names)))


def _check_names(path: Path, names: Iterable[str], expected: Collection[str]) -> None:
    names = list(names)
    present = set(names)
    missing = [name for name in expected if name not in present and not _is_counter(name)]
    strange = [name for name in names if name not in expected and not _is_surplus(name)]
    if missing or strange:
        faults = [f"{len(missing)} missing: {_first(missing)}"] if missing else []
        faults += [f"{len(strange)} not in the model: {_first(strange)}"] if strange else []
        raise InputError(f"{path} does not fit the model: {'; '.join(faults)}")


def _is_counter(name: str) -> bool:
    """Batch norm's count of batches, which old files lack and evaluation never reads."""
    return _leaf(name) == "num_batches_tracked"


def _is_surplus(name: str) -> bool:
    """What a file may have and the model not: counters, and the block of TRADES that no forward pass uses."""
    return _is_counter(name) or "sub_block1" in name.split(".")


def _check_shapes(path: Path, state: Mapping[str, Tensor], expected: Mapping[str, Tensor], head: str | None) -> None:
    wrong = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    if not wrong:
        return
    name = wrong[0]
    stored, needed = state[name].shape, expected[name].shape
    text = f"{path}: {_quote(name)} has shape {_numbers(stored)}, the model needs {_numbers(needed)}"
    if head is not None and name.startswith(f"{head}.") and stored[1:] == needed[1:] and len(stored) > 0:
        text += f": the file has {stored[0]} classes, the model {needed[0]} (num_classes={stored[0]})"
    elif len(wrong) > 1:
        text += f" (and {len(wrong) - 1} more)"
    raise InputError(text)


def _head(model: nn.Module) -> str | None:
    """The name of the last linear layer, which is the classifier in every common architecture."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def _cast(path: Path, name: str, value: Tensor, like: Tensor) -> Tensor:
    """The value in the type of the model's own tensor: floats to floats, everything else to its like."""
    known = value.dtype in _FLOATS if like.is_floating_point() else value.dtype == like.dtype
    if not known:
        raise InputError(f"{path}: {_quote(name)} is {value.dtype}; the model needs {like.dtype}")
    return value.to(like.dtype)


def _normalization_names(model: nn.Module) -> set[str]:
    """The buffers of our own ``Normalize`` layers: settings of the model, not weights of a file."""
    layers = [name for name, module in model.named_modules() if isinstance(module, Normalize)]
    return {f"{name}.{leaf}" for name in layers for leaf in ("mean", "std")}


def _is_normalization(name: str) -> bool:
    return _leaf(name) in _MEANS + _DEVIATIONS


def _check_normalization(path: Path, found: Mapping[str, Tensor], model: nn.Module) -> None:
    """A file's own normalisation must be the model's: with another every number would be wrong, silently."""
    own = next((module for module in model.modules() if isinstance(module, Normalize)), None)
    for name, value in found.items():
        which = 0 if _leaf(name) in _MEANS else 1
        if own is None:
            # No normalisation is mean 0 and deviation 1, for any number of channels.
            needed = [float(which)] * min(value.numel(), 16)
            has = "does not normalise"
        else:
            needed = (own.mean, own.std)[which].flatten().tolist()
            has = f"has {_numbers(needed)}"
        if _same(value, needed):
            continue
        named = [key for key, pair in NORMALIZATIONS.items() if _same(value, pair[which])]
        hint = f" (normalize={named[0]})" if named else ""
        stored = _numbers(value.flatten()[:4].tolist())
        raise InputError(f"{path} has its own normalisation, {_quote(name)} {stored}{hint}; the model {has}")


def _same(value: Tensor, needed: Sequence[float]) -> bool:
    """Equal up to the rounding of published constants and of float16."""
    if value.dtype not in _FLOATS or value.numel() != len(needed):
        return False
    wanted = torch.tensor(needed, dtype=torch.float64)
    return bool(torch.allclose(value.flatten().double(), wanted, rtol=0, atol=1e-3))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _numbers(values: Iterable[float]) -> str:
    """A few numbers in brackets.

    >>> _numbers((64, 3)), _numbers([0.49139])
    ('(64, 3)', '(0.4914)')
    """
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return f"({', '.join(texts[:8])}{', ...' if len(texts) > 8 else ''})"


def _quote(name: object) -> str:
    """A name out of a file, which may be anything: on one line and not too long."""
    text = repr(name)
    return text if len(text) <= 100 else text[:100] + "..."


def _first(names: list[str]) -> str:
    return ", ".join(map(_quote, names[:3])) + (", ..." if len(names) > 3 else "")
