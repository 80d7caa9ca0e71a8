"""Asking a model for logits without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError, one_line

State = tuple[Tensor, ...]
Step = Callable[..., State]
"""From one state of a search to the next, by tensor operations that do not depend on the values in the tensors."""
RepeatSteps = Callable[[Step, State, int], State]
"""Runs a step several times."""


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, ``.logits``, ``["logits"]``, or the first of a tuple.

    Half precision is widened to float32: losses and comparisons of bfloat16 logits tie and round.
    """
    if isinstance(output, tuple | list) and output:
        output = output[0]
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise InputError(f"the model returned {shape}; expected logits of shape (batch, classes)")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def both(model: nn.Module, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of two batches of one size, first the one and then the other; or by the model's own ``both``."""
    together: Any = getattr(model, "both", None)
    if together is not None:
        first, second = together(x, x_adv)
        return first, second
    return logits_of(model(x)), logits_of(model(x_adv))


def stepped(step: Step, state: State, times: int) -> State:
    """Return the state after several steps, run one by one."""
    for _ in range(times):
        state = step(*state)
    return state


class OptimizedCopy(nn.Module):
    """A faster equivalent of a model, which attacks search in its place."""

    slack: float = 0.0
    """Observed difference between its margins and the model's: an example counts as broken beyond this only."""

    def repeat_steps(self, step: Step, state: State, times: int) -> State:
        """Return the state after several steps of a search on this model."""
        return stepped(step, state, times)


def device_of(model: nn.Module) -> torch.device:
    """Where a model lives: the device of its first parameter or buffer, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating type a model computes in: that of its first floating parameter or buffer, else float32."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


def has_gradients(model: nn.Module) -> bool:
    """Whether a gradient comes back through the model: not where a part of it says ``has_gradients = False``."""
    return all(getattr(module, "has_gradients", True) for module in model.modules())


@contextmanager
def blamed_on_the_model(where: str) -> Iterator[None]:
    """Whatever a stranger's model raises becomes one line; a want of memory stays what it is."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):  # how a CPU says it
            raise torch.OutOfMemoryError(one_line(error, 160)) from error
        raise InputError(f"the model fails {where}: {one_line(error, 160)}") from error


def count_outputs(model: nn.Module, x: Tensor) -> int:
    """How many logits a model gives for these images, which it must take, and pass a gradient back to if it has any."""
    shape = "x".join(str(size) for size in x.shape[1:])
    with (
        blamed_on_the_model(f"on images of {shape} (channels x height x width)"),
        torch.enable_grad(),
        frozen(model),
    ):
        x = x.detach().to(dtype_of(model)).requires_grad_()
        logits = logits_of(model(x))
        if len(logits) != len(x):
            raise InputError(f"the model gives {len(logits)} answers for {len(x)} images")
        if has_gradients(model):
            torch.autograd.grad(logits.sum(), x, allow_unused=True)
    return int(logits.shape[1])


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Float32 that is float32: no autocast of the caller's, and on a GPU no TF32, which keeps ten bits of a product."""
    switches = _tf32_switches() if device.type == "cuda" else []
    before = [getattr(place, name) for place, name, _ in switches]
    try:
        for place, name, strict in switches:
            setattr(place, name, strict)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (place, name, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Where TF32 is switched off, and how. Newer versions of torch refuse a mixture with the older flags."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
        return [(place, "fp32_precision", "ieee") for place in places]
    return [(torch.backends.cudnn, "allow_tf32", False), (torch.backends.cuda.matmul, "allow_tf32", False)]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter asking for gradients; modes, flags and buffers are given back as they were."""
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
                if buffer._version != version:  # a model may count or remember in its own forward pass
                    buffer.copy_(value)
