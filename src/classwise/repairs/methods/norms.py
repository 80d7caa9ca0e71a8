"""Head weight norm balancing, the baseline HWNwB of DecoSAM (submission to ICLR 2026).

Every row w_k of the last linear layer is rescaled to the mean length of all rows; the biases stay:

    w_k <- w_k * mean_j |w_j| / |w_k|.

No images are needed: the change depends on the weights alone.

**Deviations**

* The common length is the mean of the row lengths. Another one would change the scale of the logits against the
  biases, and nothing else.
* A row of zeros stays zero, since it has no direction.
* The layer is found by running the model on one image. Only its shape matters.
"""

# B batch, K classes, D features

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.data import ImageSet, ordered
from classwise.errors import InputError
from classwise.forward import device_of, dtype_of, frozen, logits_of
from classwise.models.heads import head_of
from classwise.repairs.methods.base import Case, Repaired

_ROUNDING = 1e-3
"""How far logits may be from the outputs of the last layer, relative to their size."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Equal lengths for the weight rows of the last linear layer."""

    about: ClassVar[str] = "rows of the last layer's weight rescaled to their mean length (HWNwB)"
    uses_images: ClassVar[bool] = False

    def __call__(self, case: Case) -> Repaired:
        model = copy.deepcopy(case.model)
        weight = plain_head(model, case.images).weight
        with torch.no_grad():
            lengths = weight.norm(dim=1, keepdim=True)
            weight.mul_(torch.where(lengths > 0, lengths.mean() / lengths, 1.0))
        return Repaired(model=model)


def plain_head(model: nn.Module, images: ImageSet) -> nn.Linear:
    """The last linear layer of a model, whose outputs are the logits.

    Raises ``InputError`` where there is none, or where it is not a plain ``nn.Linear``.
    """
    x = next(ordered(images, [0], 1, device_of(model), dtype_of(model)))[0]
    found = head_of(model, x)
    if found is None:
        raise InputError(
            "the model has no last linear layer with one output for each class, which this repair method changes: "
            "use bias or finetune"
        )
    name, head = found
    if type(head) is not nn.Linear or not isinstance(head.weight, nn.Parameter):
        raise InputError(
            f"the last layer {name} is a {type(head).__name__}, not a plain linear layer, which this repair method "
            "needs: use bias or finetune"
        )
    features, logits = features_of(model, head, x)
    if features.dim() != 2 or not _close(F.linear(features, head.weight, head.bias).to(logits.dtype), logits):
        raise InputError(
            f"the logits of the model are not the outputs of its last linear layer {name}, which this repair method "
            "needs: use bias or finetune"
        )
    return head


def features_of(model: nn.Module, head: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer receives (B, D) and what the model returns (B, K), in evaluation mode without gradients."""
    received: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: received.append(given[0]))
    try:
        with torch.no_grad(), frozen(model):
            logits = logits_of(model(x.to(dtype_of(model))))
    finally:
        hook.remove()
    return received[-1].detach(), logits


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _ROUNDING * (1 + expected.abs().max()))
