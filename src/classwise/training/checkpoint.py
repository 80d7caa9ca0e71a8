"""Checkpoint files: the state of a run for ``--resume``, and weights.

The state is a torch file that is read with ``weights_only``: tensors and plain values, never code. Weights are
safetensors. Both are written atomically.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from classwise.core.errors import InputError
from classwise.storage.files import atomic

SCHEMA = "classwise/checkpoint/1"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a run atomically."""
    with atomic(path) as temporary:
        torch.save({"schema": SCHEMA, **state}, temporary)


def load_state(path: Path) -> dict[str, Any]:
    """Read the state of a run onto the CPU."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"no such checkpoint: {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{path} is damaged: delete the run directory and train again") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise InputError(f"{path} is not a checkpoint of this version: expected schema {SCHEMA}")
    return state


def save_weights(path: Path, model: nn.Module) -> None:
    """Write a model's weights and buffers atomically."""
    # Clones, because safetensors rejects tensors that share storage, as tied weights do.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(weights, temporary)
