"""Limits on the size of models built from third-party configurations, relative to the size of their weights files.

A configuration of a few bytes can request a million layers, which would exhaust memory before any weight is compared.
A model is therefore counted while it is built, and refused as soon as it is too large.
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
"""The limit on the numbers in a model: ``TIMES`` those in its weights files, because tied weights are stored once, plus
``MORE``, for buffers that are computed."""

PARTS_TIMES, MORE_PARTS, MOST_PARTS = 4, 1000, 50_000
"""The limit on modules, parameters and buffers: a factor of the stored tensors, a constant, and a maximum."""

LARGEST = 1_000_000
"""The largest number in a configuration; a vocabulary has a quarter of it, other sizes are smaller."""

MOST_STAGES = 200
"""The longest list of numbers, such as the depths of stages."""

LEVIT_GRID = 24
"""The maximum number of patches along an image for LeViT, which enumerates pairs while it is built; usual are 14."""


def check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with numbers so large that transformers would allocate huge lists."""
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
            raise InputError(f"{path} is refused: {key[:40]!r} is larger than in any known classifier")
    if config.get("model_type") == "levit":
        side, patch = config.get("image_size", 224), config.get("patch_size", 16)
        if not (isinstance(side, int) and isinstance(patch, int) and patch > 0 and side // patch <= LEVIT_GRID):
            raise InputError(
                f"{path} is refused: a LeViT with more than {LEVIT_GRID} patches per side takes too long to build"
            )


@contextmanager
def no_larger_than_its_weights(folder: Path) -> Iterator[None]:
    """Raise an error in this context if a model has many more parts or numbers than the safetensors of a folder."""
    stored = [shape for file in sorted(folder.glob("*.safetensors")) for shape in _shapes(file)]
    most_numbers = TIMES * sum(map(math.prod, stored)) + MORE
    most_parts = min(PARTS_TIMES * len(stored) + MORE_PARTS, MOST_PARTS)
    thread, total = threading.get_ident(), 0
    sizes: dict[tuple[int, str], int] = {}

    def count(owner: nn.Module, name: str, part: Tensor | nn.Module | None) -> None:
        nonlocal total
        if threading.get_ident() != thread:  # the hooks are global
            return
        key, size = (id(owner), name), part.numel() if isinstance(part, Tensor) else 0
        total += size - sizes.get(key, 0)  # loaded weights replace the initial ones
        sizes[key] = size
        if len(sizes) > most_parts or total > most_numbers:
            raise InputError(f"{folder} is refused: its configuration describes a far larger model than its weights")

    with ExitStack() as hooks:
        for register in (
            registration.register_module_parameter_registration_hook,
            registration.register_module_buffer_registration_hook,
            registration.register_module_module_registration_hook,
        ):
            hooks.enter_context(register(count))
        yield


def _shapes(file: Path) -> list[list[int]]:
    """Return the shapes of the tensors in a file, from its header; a damaged file has none and is reported later."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            return [tensors.get_slice(name).get_shape() for name in names]
    except (OSError, SafetensorError):
        return []
