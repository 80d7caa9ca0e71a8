"""How large a model may become whose configuration somebody else wrote: not much larger than the weights beside it.

A configuration of a few bytes can ask for a million layers, and building them would take all memory before any weight
is compared. Here a model is counted while it is built, and refused as soon as it is too large.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules import module as registration

from classwise.core.errors import InputError

TIMES, MORE = 2, 10_000_000
"""A model may hold so many times the numbers of its weights files, because weights that are tied are stored once, and
so many more, for what it works out by itself."""

PARTS_TIMES, MORE_PARTS, MOST_PARTS = 4, 1000, 50_000
"""So many modules, parameters and buffers for each stored tensor, so many more, and so many at most."""

LARGEST = 1_000_000
"""A vocabulary has a quarter of it; image sizes, widths, depths and classes are smaller."""

MOST_STAGES = 200
"""Numbers in one list, as the depths of stages."""

LEVIT_GRID = 24
"""Patches along an image. LeViT goes through every pair of them for each layer while it is built; its own has 14."""


def check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with numbers that no classifier has, of which transformers would make lists at once."""
    parts: list[tuple[str, Any]] = list(config.items())
    while parts:
        key, part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.items()
            continue
        values = part if isinstance(part, list) else [part]
        parts += [(key, value) for value in values if isinstance(value, Mapping | list)]
        numbers = [value for value in values if isinstance(value, int)]
        if len(numbers) > MOST_STAGES or sum(map(abs, numbers)) > LARGEST:
            raise InputError(f"{path} is refused: {key[:40]!r} is larger than that of any classifier")
    if config.get("model_type") == "levit":
        side, patch = config.get("image_size", 224), config.get("patch_size", 16)
        if not (isinstance(side, int) and isinstance(patch, int) and patch > 0 and side // patch <= LEVIT_GRID):
            raise InputError(f"{path} is refused: a LeViT with more than {LEVIT_GRID} patches a side takes forever")


@contextmanager
def no_larger_than_its_weights(folder: Path) -> Iterator[None]:
    """Within, building a model with many more parts or numbers than the safetensors of a folder have is an error."""
    stored = [shape for file in sorted(folder.glob("*.safetensors")) for shape in _shapes(file)]
    most_numbers = TIMES * sum(map(math.prod, stored)) + MORE
    most_parts = min(PARTS_TIMES * len(stored) + MORE_PARTS, MOST_PARTS)
    thread, total = threading.get_ident(), 0
    sizes: dict[tuple[int, str], int] = {}

    def count(owner: nn.Module, name: str, part: Tensor | nn.Module | None) -> None:
        nonlocal total
        if threading.get_ident() != thread:  # the hooks are the whole process's
            return
        place, size = (id(owner), name), part.numel() if isinstance(part, Tensor) else 0
        total += size - sizes.get(place, 0)  # weights take the places of those that a model was built with
        sizes[place] = size
        if len(sizes) > most_parts or total > most_numbers:
            raise InputError(f"{folder} is refused: its configuration asks for far more weights than it holds")

    with ExitStack() as hooks:
        for register in (
            registration.register_module_parameter_registration_hook,
            registration.register_module_buffer_registration_hook,
            registration.register_module_module_registration_hook,
        ):
            hooks.enter_context(register(count))
        yield


def _shapes(file: Path) -> list[list[int]]:
    """Of every tensor in a file, of which only the head is read; none of a damaged one, which its reader tells."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            return [tensors.get_slice(name).get_shape() for name in names]
    except (OSError, SafetensorError):
        return []
