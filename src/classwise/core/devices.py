"""Choice of the device to compute on."""

from __future__ import annotations

import os

import torch

from classwise.core.errors import InputError, one_line


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the given device; None selects a GPU if available, else the CPU."""
    if device is None:
        return _own_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        chosen = _own_device(torch.device(device))
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"cannot use device {device!s}; expected cpu, cuda or cuda:N ({one_line(error, 120)})"
        ) from None
    return chosen


def _own_device(device: torch.device) -> torch.device:
    """Select the CUDA device of this process by its local rank if several processes run on this machine."""
    rank = os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or device.index is not None or rank is None:
        return device
    if int(rank) >= (count := torch.cuda.device_count()):
        raise InputError(f"process {int(rank) + 1} on this machine has no GPU: start at most {count} processes")
    return torch.device("cuda", int(rank))
