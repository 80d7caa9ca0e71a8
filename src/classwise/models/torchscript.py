"""TorchScript files, which are programs and are executed only with explicit permission."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError


class Scripted(nn.Module):
    """A TorchScript module wrapped in a Python module, which supports hooks."""

    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(x)


def load_script(path: Path, *, trust: bool) -> nn.Module:
    """Load a TorchScript file; ``trust`` permits executing it."""
    if not path.is_file():
        raise InputError(f"model 'torchscript:{path}': no such file")
    if not trust:
        raise InputError(
            f"{path} is a TorchScript program, which can execute any code: add --trust if you trust its author"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the format
            return Scripted(torch.jit.load(path, map_location="cpu"))  # type: ignore[no-untyped-call]
    except Exception as error:  # RuntimeError, and whatever a damaged archive raises
        raise InputError(f"{path} is not a TorchScript file; expected a file written by torch.jit.save") from error
