"""Which device computes."""

from __future__ import annotations

import os

import torch

from classwise.core.errors import InputError, one_line


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; else a GPU where there is one."""
    if device is None:
        return _device_among(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        chosen = _device_among(torch.device(device))
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"cannot use device {device!s}: {one_line(error, 120)}") from None
    return chosen


def _device_among(device: torch.device) -> torch.device:
    """A device without a number as that of this process, where several were started on one machine."""
    place, number = os.environ.get("LOCAL_RANK"), device.index
    if device.type != "cuda" or number is not None or place is None:
        return device
    if int(place) >= (there := torch.cuda.device_count()):
        raise InputError(f"process {int(place) + 1} on this machine has no GPU of its own: there are {there}")
    return torch.device("cuda", int(place))
