"""Labels by a model for images that have none: the first step of robust self-training (Carmon et al. 2019)."""

# B batch, K classes

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from classwise.core.model_calls import device_of, exact, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.data import ImageSet, ordered

BATCH = 500


def pseudo_labelled(
    model: nn.Module, images: ImageSet, classes: tuple[str, ...] | None, progress: Progress = SILENT
) -> ImageSet:
    """The same images with the classes a model takes them for, whatever labels they had."""
    device, found = device_of(model), []
    progress.start("label extra images", len(images))
    with torch.no_grad(), frozen(model), exact(device):
        for x, _, _ in ordered(images, None, BATCH, device):
            found.append(logits_of(model(x)).argmax(1).cpu().numpy())
            progress.advance(len(x))
    progress.finish()
    return replace(images, labels=np.concatenate(found), classes=classes)
