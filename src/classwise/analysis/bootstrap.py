"""Asking a model about images at hand, and redrawing what it says."""

# N examples, K classes

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classwise.core.model_calls import device_of, exact, frozen, logits_of

Floats = NDArray[np.float64]
RESAMPLES = 2000
AT_ONCE = 2**20
"""Numbers that are redrawn in one go, to bound the memory."""


def ask(model: nn.Module, x: Tensor) -> Tensor:
    """(N, K) logits in float32 on the CPU, computed without shortcuts; the model is left as it was."""
    device = device_of(model)
    with torch.no_grad(), frozen(model), exact(device):
        return logits_of(model(x.to(device))).float().cpu()


def redrawn_means(values: Floats, random: np.random.Generator) -> Floats:
    """The means of as many values, drawn with replacement, again and again: what a bootstrap needs of a mean."""
    rows = max(1, AT_ONCE // len(values))
    counts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([values[random.integers(len(values), size=(some, len(values)))].mean(1) for some in counts])
