"""What a run costs besides time: passes through the model, and memory. Watched in the warm-up round only."""

# B batch

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE_SECONDS = 0.002
"""How often resident memory is looked at."""
STATM = Path("/proc/self/statm")


@dataclass(slots=True)
class Passes:
    """Images that went through a model, and gradients that came back to images."""

    forwards: int = 0
    backwards: int = 0


@contextmanager
def counting(*modules: nn.Module) -> Iterator[Passes]:
    """Count the passes through modules, none of which calls another.

    A hook before each forward pass counts the images of its batch, and a hook on these images counts as many again
    whenever a gradient arrives at them, however often and in whatever way it was asked for.
    """
    passes = Passes()

    def back(gradient: Tensor) -> None:
        passes.backwards += len(gradient)

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = inputs[0]
        passes.forwards += len(x)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None
        x = x.view_as(x)  # of this pass alone: the same images may be asked about twice
        x.register_hook(back)
        return x, *inputs[1:]

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
        yield passes


@dataclass(slots=True)
class Peak:
    """The most memory beyond what was in use before, in bytes; None where it cannot be told."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Watch how far memory grows: what torch allocates on a GPU, else the resident memory of this process."""
    with _allocated(device) if device.type == "cuda" else _resident() as peak:
        yield peak


@contextmanager
def _allocated(device: torch.device) -> Iterator[Peak]:
    peak = Peak()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    torch.cuda.synchronize(device)
    peak.bytes = torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _resident() -> Iterator[Peak]:
    """By a thread that looks every few milliseconds."""
    peak = Peak()
    if not STATM.exists():
        yield peak
        return
    _return_free_memory()
    before = highest = _resident_bytes()
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_SECONDS):
            highest = max(highest, _resident_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
    peak.bytes = max(highest, _resident_bytes()) - before


def _resident_bytes() -> int:
    """Without pages of files: the code of a library that is used for the first time is not what a run needs."""
    resident, shared = map(int, STATM.read_text(encoding="ascii").split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _return_free_memory() -> None:
    """Give the system what the C library holds of freed memory: what one run freed would hide what the next needs."""
    with suppress(AttributeError, OSError, TypeError):  # only the GNU library has this
        ctypes.CDLL(None).malloc_trim(0)
