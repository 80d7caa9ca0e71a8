"""Asking a model for logits without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from classwise.errors import InputError


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, an object with ``.logits``, or the first of a tuple.

    Half precision is widened to float32: losses and comparisons of bfloat16 logits tie and round.
    """
    if isinstance(output, tuple | list) and output:
        output = output[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise InputError(f"the model returned {shape}; expected logits of shape (batch, classes)")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


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


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Float32 that is float32: no autocast of the caller's, and no TF32, which keeps ten bits of a product."""
    flags = [(torch.backends.cudnn, "allow_tf32"), (torch.backends.cuda.matmul, "allow_tf32")]
    before = [getattr(place, name) for place, name in flags]
    try:
        for place, name in flags:
            setattr(place, name, False)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (place, name), value in zip(flags, before, strict=True):
            setattr(place, name, value)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter asking for gradients; every module and flag is given back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
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
