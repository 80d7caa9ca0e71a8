"""Judge images by float32 forward passes of the model itself.

An adversarial example counts only if the model misclassifies it here and it lies in the ball and in [0, 1]. Attacks may
search a faster, less exact copy of the model: they can miss an adversarial example but never report a false one.
"""

# B batch, K classes

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from classwise.core.errors import InputError
from classwise.core.model_calls import dtype_of, exact, frozen, logits_of, model_errors
from classwise.core.threat import Ball
from classwise.metrics.counts import Ints

MAX_IMAGES = 500
"""Maximum number of images in one forward pass: in float32, 1500 images can take gigabytes of GPU memory."""


def compute_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits (B, K), computed in evaluation mode and without autocast or TF32.

    Raises ``InputError`` for logits that are NaN or infinite.
    """
    with model_errors("on natural or attacked images"), torch.no_grad(), frozen(model), exact(x.device):
        logits = torch.cat([logits_of(model(part)) for part in torch.split(x.to(dtype_of(model)), MAX_IMAGES)])
    if not bool(logits.isfinite().all()):
        raise InputError("the model returned NaN or infinite logits, so its predictions are undefined")
    return logits


def predict(model: nn.Module, x: Tensor) -> Ints:
    """Return the predicted labels (B,)."""
    return np.asarray(compute_logits(model, x).argmax(1).cpu())


def judge(model: nn.Module, ball: Ball, x_adv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (B, K) on attacked images, and whether each image is valid (B,).

    An image outside its ball or outside [0, 1] is invalid and is replaced by the natural image.
    """
    valid = ball.contains(x_adv)
    return compute_logits(model, torch.where(valid[:, None, None, None], x_adv, ball.center)), valid
