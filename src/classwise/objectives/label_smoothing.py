"""Label smoothing (Szegedy et al. 2016): a share a of the target distribution is spread over all K classes.

    CE_a(z, y) = (1 - a) * CE(z, y) + a * mean_k CE(z, k)

Only the training loss is smoothed; the training attack uses the true label.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import Objective


@dataclass(frozen=True, kw_only=True)
class Smoothed(Objective):
    """The base of objectives with a cross-entropy, which may use smoothed labels."""

    smoothing: Number = 0.0
    """Share of the target distribution that is spread over all classes."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise InputError(f"smoothing must be at least 0 and below 1, got {self.smoothing}")

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy with smoothed labels (B,)."""
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=self.smoothing)
