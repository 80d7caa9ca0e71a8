"""Architectures by name, and everybody else's models.

Every factory takes keyword settings only, among them ``num_classes``, ``in_channels`` and ``normalize``, and
returns a freshly initialised model that takes NCHW images in [0, 1]. By its registered name it also takes ``head``.
``load.load_model`` adds the weights.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from classwise.models.hypersphere import HypersphereHead, with_choice_of_head, with_hypersphere
from classwise.models.normalize import Normalize, Normalized, normalized
from classwise.models.preact_resnet import PreActResNet, preact_resnet18
from classwise.models.resnet import ResNet, resnet18, resnet34, resnet50
from classwise.models.small import DigitsCNN, SmallCNN, digits_cnn, small_cnn
from classwise.models.wide_resnet import WideResNet, wide_resnet

_FACTORIES: dict[str, Callable[..., nn.Module]] = {
    "digits-cnn": digits_cnn,
    "preact-resnet18": preact_resnet18,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "small-cnn": small_cnn,
    "wide-resnet": wide_resnet,
}
MODELS = {name: with_choice_of_head(factory) for name, factory in _FACTORIES.items()}

__all__ = [
    "MODELS",
    "DigitsCNN",
    "HypersphereHead",
    "Normalize",
    "Normalized",
    "PreActResNet",
    "ResNet",
    "SmallCNN",
    "WideResNet",
    "digits_cnn",
    "normalized",
    "preact_resnet18",
    "resnet18",
    "resnet34",
    "resnet50",
    "small_cnn",
    "wide_resnet",
    "with_hypersphere",
]
