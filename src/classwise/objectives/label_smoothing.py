"""Label smoothing (Szegedy et al. 2016): the label keeps 1 - a of the target, and a is spread over all K classes.

CE_a(z, y) = (1 - a) · CE(z, y) + a · mean over k of CE(z, k).

Only the loss is smoothed; the training attack works against the true label.
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
    """An objective with a cross-entropy in it."""

    smoothing: Number = 0.0
    """Share of the target that is spread over all classes."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise InputError(f"smoothing must lie in [0, 1), got {self.smoothing}")

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B,) from the smoothed labels."""
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=self.smoothing)
