"""Choice of the device to compute on."""

from __future__ import annotations

import os

import torch

from classwise.core.errors import InputError, one_line


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the given device; None selects a GPU if available, else the CPU."""
    if device is None:
        return _own_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = _own_device(parse_device(device))
    try:
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(error, 120)
        if chosen.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            reason = "this PyTorch build has no CUDA support"
        elif chosen.type == "cuda" and not torch.cuda.is_available():
            reason = "PyTorch found no GPU"
        raise InputError(f"device {str(device)!r} is not available: {reason}; expected cpu, cuda or cuda:N") from None
    return chosen


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device of that name, which may be unavailable."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"unknown device {str(device)!r}; expected cpu, cuda or cuda:N") from None


def _own_device(device: torch.device) -> torch.device:
    """Select the CUDA device of this process by its local rank if several processes run on this machine."""
    rank = os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or device.index is not None or rank is None:
        return device
    if int(rank) >= (count := torch.cuda.device_count()):
        raise InputError(f"process {int(rank) + 1} on this machine has no GPU: start at most {count} processes")
    return torch.device("cuda", int(rank))
