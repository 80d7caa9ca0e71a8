"""Check that a model and images fit together, and choose examples and a batch size."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from classwise.core.errors import InputError
from classwise.core.model_calls import count_outputs, device_of
from classwise.data import ImageSet, balanced_subset, ordered
from classwise.metrics.counts import Ints

SAMPLE, SAMPLE_BATCH = 100, 10
"""Number of examples on which a model is inspected before an evaluation, and a batch size that fits any memory."""


def count_classes(model: nn.Module, images: ImageSet, size: int | None = None) -> int:
    """Return the number of classes.

    With ``size`` the model gets the central ``size`` x ``size`` pixels. Raises ``InputError`` if the model and the data
    have different classes.
    """
    first = np.arange(min(2, len(images)))
    outputs = count_outputs(model, next(ordered(images, first, len(first), device_of(model), size=size))[0])
    if outputs < 2:
        raise InputError("the model has one output: expected one logit per class, at least 2")
    if images.classes is not None and outputs != len(images.classes):
        raise InputError(f"the model has {outputs} outputs, but {images.name} has {len(images.classes)} classes")
    if (largest := int(images.labels.max())) >= outputs:
        raise InputError(
            f"{images.name}: label {largest} is out of range: the model has {outputs} outputs, so labels must be 0 to "
            f"{outputs - 1}"
        )
    return outputs


def choose_examples(images: ImageSet, per_class: int | None, num_classes: int) -> Ints:
    """Return the indices of all examples, or of the first ``per_class`` of each class."""
    if per_class is None:
        return np.arange(len(images))
    return balanced_subset(images.labels, per_class, num_classes)


def default_batch_size(images: ImageSet, device: torch.device) -> int:
    """Return a batch size that is efficient and fits the memory: for CIFAR images 97 on a CPU, 1497 on a GPU."""
    pixels = int(np.prod(images.images.shape[1:]))
    budget = 300_000 if device.type == "cpu" else 4_600_000
    return max(1, min(2000, budget // pixels))
