"""Calls of a model that leave its modes, flags and buffers unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError, one_line

State = tuple[Tensor, ...]
Step = Callable[..., State]
"""Maps one state of a search to the next, by tensor operations that do not depend on tensor values."""
RepeatSteps = Callable[[Step, State, int], State]
"""Runs a step several times."""


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output: a tensor, ``.logits``, ``["logits"]``, or the first item of a tuple.

    Half precision is converted to float32, because losses and comparisons of bfloat16 logits have ties.
    """
    if isinstance(output, tuple | list) and output:
        output = output[0]
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise InputError(f"the model returned {shape}; expected logits of shape (batch, classes)")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def both(model: nn.Module, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of two batches of equal size, by two calls or by the model's method ``both``."""
    method: Any = getattr(model, "both", None)
    if method is not None:
        first, second = method(x, x_adv)
        return first, second
    return logits_of(model(x)), logits_of(model(x_adv))


def run_steps(step: Step, state: State, times: int) -> State:
    """Return the state after several steps, run one by one."""
    for _ in range(times):
        state = step(*state)
    return state


class OptimizedCopy(nn.Module):
    """A faster equivalent of a model, which attacks search in its place."""

    slack: float = 0.0
    """Observed difference between its margins and the model's. An example counts as broken only beyond it."""

    def repeat_steps(self, step: Step, state: State, times: int) -> State:
        """Return the state after several steps of a search on this model."""
        return run_steps(step, state, times)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter or buffer; float32 if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


def state_parts(model: nn.Module) -> list[str | memoryview]:
    """Return the names and the bytes of a model's state dict for a digest, independent of the device."""
    parts: list[str | memoryview] = []
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            parts += [f"{name} {tuple(value.shape)} {value.dtype}", flat.numpy().data]
    return parts


def has_gradients(model: nn.Module) -> bool:
    """Return whether a model is differentiable: no module has the attribute ``has_gradients = False``."""
    return all(getattr(module, "has_gradients", True) for module in model.modules())


@contextmanager
def model_errors(where: str) -> Iterator[None]:
    """Convert exceptions raised by a user's model to one-line errors, except out-of-memory errors."""
    with _one_line_errors(f"the model fails {where}"):
        yield


@contextmanager
def attack_errors(name: str, model: nn.Module) -> Iterator[None]:
    """Convert exceptions of an attack to one-line errors, except out-of-memory errors and those raised by the model."""
    try:
        yield
    except Exception as error:
        calls = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is nn.Module._call_impl.__code__)
        if not {*model.modules()}.isdisjoint(frame.f_locals["self"] for frame in calls):
            raise
        with _one_line_errors(f"attack {name!r} failed"):
            raise


@contextmanager
def _one_line_errors(prefix: str) -> Iterator[None]:
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):  # the message on a CPU
            raise torch.OutOfMemoryError(one_line(error, 160)) from error
        raise InputError(f"{prefix}: {one_line(error, 160)}") from error


def count_outputs(model: nn.Module, x: Tensor) -> int:
    """Count a model's logits on some images; raises if the forward or backward pass fails."""
    shape = "x".join(str(size) for size in x.shape[1:])
    with (
        model_errors(f"on images of {shape} (channels x height x width)"),
        torch.enable_grad(),
        frozen(model),
    ):
        x = x.detach().to(dtype_of(model)).requires_grad_()
        logits = logits_of(model(x))
        if len(logits) != len(x):
            raise InputError(f"the model returned {len(logits)} rows of logits for {len(x)} images")
        if has_gradients(model):
            if not logits.requires_grad:
                raise InputError(
                    "the model returns logits without a gradient: remove detach() and torch.no_grad() from forward, or "
                    "set has_gradients = False on the model and use black-box attacks such as square"
                )
            torch.autograd.grad(logits.sum(), x, allow_unused=True)
    return int(logits.shape[1])


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Compute float32 exactly in the block: no autocast, and on a GPU no TF32, which has ten mantissa bits."""
    switches = _tf32_switches() if device.type == "cuda" else []
    before = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, strict in switches:
            setattr(owner, name, strict)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Return the flags that disable TF32 and their values. Newer torch versions reject a mixture with older flags."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
        return [(owner, "fp32_precision", "ieee") for owner in owners]
    return [(torch.backends.cudnn, "allow_tf32", False), (torch.backends.cuda.matmul, "allow_tf32", False)]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and disable parameter gradients in the block; restore modes, flags and buffers at its end."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        for module, training in modes:
            if training:
                module.training = False
        for parameter, needed in flags:
            if needed:
                parameter.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needed in flags:
            parameter.requires_grad_(needed)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:  # a forward pass may change buffers
                    buffer.copy_(value)
