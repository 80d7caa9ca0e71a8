"""Architectures by name, and loading of models from files, folders and other libraries.

Every factory takes keyword settings only, among them ``num_classes``, ``in_channels``, ``normalize`` and ``head``, and
returns an initialized model that takes NCHW images in [0, 1]. ``load.load_model`` adds the weights.

The architectures are implemented here because libraries lack their variants for small images with the state-dict
names of published checkpoints. Imports ``core``, ``config``, ``storage`` and ``metrics``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from classwise.models.densenet import densenet121, densenet169
from classwise.models.hypersphere import HypersphereHead, with_hypersphere
from classwise.models.inception import GoogLeNet, InceptionV3, googlenet, inception_v3
from classwise.models.lenet import LeNet, lenet
from classwise.models.mobilenet import mobilenet_v2
from classwise.models.normalize import normalized
from classwise.models.preact_resnet import PreActResNet, preact_resnet18
from classwise.models.resnet import resnet18, resnet34, resnet50
from classwise.models.small import DigitsCNN, SmallCNN, digits_cnn, small_cnn
from classwise.models.vgg import vgg16, vgg19
from classwise.models.vit import ViT, vit
from classwise.models.wide_resnet import WideResNet, wide_resnet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "densenet121": densenet121,
    "densenet169": densenet169,
    "digits-cnn": digits_cnn,
    "googlenet": googlenet,
    "inception-v3": inception_v3,
    "lenet": lenet,
    "mobilenet-v2": mobilenet_v2,
    "preact-resnet18": preact_resnet18,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "small-cnn": small_cnn,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "vit": vit,
    "wide-resnet": wide_resnet,
}

__all__ = [
    "MODELS",
    "DigitsCNN",
    "GoogLeNet",
    "HypersphereHead",
    "InceptionV3",
    "LeNet",
    "PreActResNet",
    "SmallCNN",
    "ViT",
    "WideResNet",
    "digits_cnn",
    "normalized",
    "preact_resnet18",
    "resnet18",
    "small_cnn",
    "with_hypersphere",
]
