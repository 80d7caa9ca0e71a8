"""Head weight norm balancing, the baseline HWNwB of DecoSAM (submission to ICLR 2026).

Every row w_k of the last linear layer is rescaled to the mean length of all rows; the biases stay:

    w_k <- w_k * mean_j |w_j| / |w_k|.

No images are needed: the change depends on the weights alone.

**Deviations**

* The common length is the mean of the row lengths. Another length would only change the scale of the logits relative to
  the biases.
* A row of zeros stays zero, since it has no direction.
* The layer is found by running the model on one image. Only its shape matters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch

from classwise.models.heads import plain_head
from classwise.repairs.methods.base import Case, Images, Repaired


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Equal lengths for the weight rows of the last linear layer."""

    about: ClassVar[str] = "Rows of the last layer's weight rescaled to their mean norm (HWNwB)"
    uses: ClassVar[Images] = "none"

    def __call__(self, case: Case) -> Repaired:
        model = copy.deepcopy(case.model)
        weight = plain_head(model, case.example).weight
        with torch.no_grad():
            lengths = weight.norm(dim=1, keepdim=True)
            weight.mul_(torch.where(lengths > 0, lengths.mean() / lengths, 1.0))
        return Repaired(model=model)
