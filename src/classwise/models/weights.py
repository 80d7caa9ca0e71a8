"""Loading of weights into a model: names, shapes, types and normalization must agree.

Names are matched strictly after known prefixes are removed. Only the following are ignored: the counters of batch norm
and weight averaging, the unused block of TRADES, the second copy that the robustness library saves, and a normalization
equal to the model's. Removals and additions are logged, one line each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError
from classwise.core.model_calls import state_parts
from classwise.models.normalize import NORMALIZATIONS, Normalize, normalized
from classwise.models.weights_file import quoted, read_weights
from classwise.storage.files import digest

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "ema_model.", "ema.", "0.", "1.")
"""Prefixes that DataParallel, torch.compile, wrappers and Sequential add to every name."""

ATTACKER = "attacker"
"""The name under which models of the robustness library contain the whole model again."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_MEANS = ("mean", "mu", "new_mean")

_DEVIATIONS = ("std", "sigma", "new_std")

_LOG = logging.getLogger(__name__)


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Load a weights file into a model, cast to the model's types; on an error the model is unchanged."""
    _fill(model, Path(path), read_weights(path))


def with_weights(model: nn.Module, path: Path | str) -> nn.Module:
    """Load a weights file into a model and return it, with the file's normalization added if the model has none."""
    path = Path(path)
    state = read_weights(path)
    own = any(isinstance(module, Normalize) for module in model.modules())
    if not own and not any(map(_is_normalization, model.state_dict())):
        found = _stored_normalization(path, state)
        if found is not None:
            mean, std = found
            model = normalized(model, mean, std)
            _LOG.info("%s: added its normalization, mean %s and std %s", path, _numbers(mean), _numbers(std))
    _fill(model, path, state)
    return model


def _fill(model: nn.Module, path: Path, state: dict[str, Tensor]) -> None:
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
        state.pop("n_averaged", None)  # the counter of torch's AveragedModel does not have its prefix
    copies = [name for name in state if ATTACKER in name.split(".")]
    if copies and len(copies) < len(state) and not any(ATTACKER in name.split(".") for name in expected):
        state = {name: value for name, value in state.items() if name not in set(copies)}
        _LOG.info("%s: ignored the second copy under %r", path, ATTACKER)
    filled, prefix = _rename(state, expected)
    if prefix:
        _LOG.info("%s: removed %r from every name", path, prefix)
    _check_names(path, filled, expected)
    filled = {name: value for name, value in filled.items() if name in expected}
    _check_shapes(path, filled, expected, _head(model))
    cast = {name: _cast(path, name, value, expected[name]) for name, value in filled.items()}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in cast.items():
        # A mask among the buffers may contain infinities; a weight may not.
        usable = value.isfinite() if name in trained else ~value.isnan()
        if not bool(usable.all()):
            raise InputError(f"{path}: {quoted(name)} contains values that are not finite")
    model.load_state_dict({**model.state_dict(), **cast})


def digest_model(model: nn.Module) -> str:
    """Return the fingerprint of a model: its class and its state dict, independent of the device."""
    return digest(type(model).__name__, *state_parts(model))


def _rename(state: Mapping[str, Tensor], expected: Collection[str]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors with prefixes removed, or ``model.`` added, to fit the expected names, and the removed "
    "prefix."""
    rest, prefixes = list(state), [""]
    while prefix := next((p for p in PREFIXES if rest and all(name.startswith(p) for name in rest)), ""):
        rest = [name.removeprefix(prefix) for name in rest]
        prefixes.append(prefixes[-1] + prefix)
    renamed = [
        ({added + name.removeprefix(prefix): value for name, value in state.items()}, prefix.removesuffix(added))
        for prefix in prefixes
        for added in ("", "model.")
    ]
    return min(renamed, key=lambda tried: len(set(expected).symmetric_difference(tried[0])))


def _check_names(path: Path, names: Iterable[str], expected: Collection[str]) -> None:
    names = list(names)
    present = set(names)
    missing = [name for name in expected if name not in present and not _is_counter(name)]
    unexpected = [name for name in names if name not in expected and not _is_surplus(name)]
    if missing or unexpected:
        faults = [f"{len(missing)} missing: {_first(missing)}"] if missing else []
        faults += [f"{len(unexpected)} not in the model: {_first(unexpected)}"] if unexpected else []
        raise InputError(f"{path} does not fit the model: {'; '.join(faults)}")


def _is_counter(name: str) -> bool:
    """Whether a name is batch norm's counter, which old files lack and evaluation does not use."""
    return _leaf(name) == "num_batches_tracked"


def _is_surplus(name: str) -> bool:
    """Whether a name may be missing in the model: counters, and the unused block of TRADES."""
    return _is_counter(name) or "sub_block1" in name.split(".")


def _check_shapes(path: Path, state: Mapping[str, Tensor], expected: Mapping[str, Tensor], head: str | None) -> None:
    wrong = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    if not wrong:
        return
    name = wrong[0]
    stored, needed = state[name].shape, expected[name].shape
    text = f"{path}: {quoted(name)} has shape {_numbers(stored)}; the model has {_numbers(needed)}"
    if head is not None and name.startswith(f"{head}.") and stored[1:] == needed[1:] and len(stored) > 0:
        text += f": the file has {stored[0]} classes, the model has {needed[0]} (num_classes={stored[0]})"
    elif len(wrong) > 1:
        text += f" (and {len(wrong) - 1} more)"
    raise InputError(text)


def _head(model: nn.Module) -> str | None:
    """Return the name of the last linear layer, which is the classifier in common architectures."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def _cast(path: Path, name: str, value: Tensor, target: Tensor) -> Tensor:
    """Cast a tensor to the type of the model's; only floats are converted."""
    castable = value.dtype in _FLOATS if target.is_floating_point() else value.dtype == target.dtype
    if not castable:
        raise InputError(f"{path}: {quoted(name)} is {value.dtype}; the model has {target.dtype}")
    return value.to(target.dtype)


def _normalization_names(model: nn.Module) -> set[str]:
    """Return the names of the buffers of ``Normalize`` layers, which are settings of the model."""
    layers = [name for name, module in model.named_modules() if isinstance(module, Normalize)]
    return {f"{name}.{leaf}" for name in layers for leaf in ("mean", "std")}


def _is_normalization(name: str) -> bool:
    return _leaf(name) in _MEANS + _DEVIATIONS


def _check_normalization(path: Path, found: Mapping[str, Tensor], model: nn.Module) -> None:
    """Require the normalization in a file to be the model's; another one would silently change all results."""
    own = next((module for module in model.modules() if isinstance(module, Normalize)), None)
    for name, value in found.items():
        which = 0 if _leaf(name) in _MEANS else 1
        if own is None:
            # No normalization is mean 0 and standard deviation 1, for any number of channels.
            needed = [float(which)] * min(value.numel(), 16)
            has = "does not normalize"
        else:
            needed = (own.mean, own.std)[which].flatten().tolist()
            has = f"has {_numbers(needed)}"
        if _same(value, needed):
            continue
        named = [key for key, pair in NORMALIZATIONS.items() if _same(value, pair[which])]
        hint = f" (normalize={named[0]})" if named else ""
        stored = _numbers(value.flatten()[:4].tolist())
        raise InputError(f"{path} has another normalization, {quoted(name)} {stored}{hint}; the model {has}")


def _stored_normalization(path: Path, state: Mapping[str, Tensor]) -> tuple[list[float], list[float]] | None:
    """Return the mean and standard deviation of each channel in a file; None if there are none, or the identity."""
    pair = []
    for leaves, nothing in ((_MEANS, 0.0), (_DEVIATIONS, 1.0)):
        found = {name: value for name, value in state.items() if _leaf(name) in leaves}
        if not found:
            return None
        name, first = next(iter(found.items()))
        if not 1 <= first.numel() <= 16 or first.dtype not in _FLOATS:
            raise InputError(f"{path}: {quoted(name)} is not a normalization: {first.dtype} of {first.numel()} numbers")
        values = [float(value) for value in first.flatten()]
        for other, value in found.items():
            if not _same(value, values):
                raise InputError(
                    f"{path} has two normalizations: {quoted(name)} and {quoted(other)} differ; expected one"
                )
        pair.append((values, all(abs(value - nothing) < 1e-6 for value in values)))
    (mean, zero), (std, one) = pair
    return None if zero and one else (mean, std)


def _same(value: Tensor, needed: Sequence[float]) -> bool:
    """Whether values agree up to the rounding of published constants and of float16."""
    if value.dtype not in _FLOATS or value.numel() != len(needed):
        return False
    wanted = torch.tensor(needed, dtype=torch.float64)
    return bool(torch.allclose(value.flatten().double(), wanted, rtol=0, atol=1e-3))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _numbers(values: Iterable[float]) -> str:
    """Format a few numbers in parentheses.

    >>> _numbers((64, 3)), _numbers([0.49139])
    ('(64, 3)', '(0.4914)')
    """
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return f"({', '.join(texts[:8])}{', ...' if len(texts) > 8 else ''})"


def _first(names: list[str]) -> str:
    return ", ".join(map(quoted, names[:3])) + (", ..." if len(names) > 3 else "")
