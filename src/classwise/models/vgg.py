"""VGG with batch norm and one linear layer as the head.

Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (ICLR 2015), table 1,
configurations D (VGG-16) and E (VGG-19). State-dict names as in the widely used CIFAR code: ``features.0`` to
``features.43`` or ``features.52``, ``classifier``.

14,728,266 and 20,040,522 parameters for ten classes: those of torchvision's vgg16_bn (138,365,992) and vgg19_bn
(143,678,248) with one linear layer of 5,130 parameters instead of three with 123,642,856.

Deviations: batch norm after every convolution, which keeps its bias; one linear layer instead of three; no dropout. The
poolings round up, so that images of 28 pixels are not reduced to nothing. The last map is averaged; for 32 pixels it is
a single point.
"""

# B batch, K classes, C channels

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from classwise.models.initialization import he_normal
from classwise.models.settings import Count, architecture

PLANES = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions and a pooling; ``convolutions`` is the number of convolutions of each."""

    def __init__(self, convolutions: Sequence[int], *, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = in_channels
        for planes, repeated in zip(PLANES, convolutions, strict=True):
            for _ in range(repeated):
                layers += [nn.Conv2d(before, planes, 3, padding=1), nn.BatchNorm2d(planes), nn.ReLU()]
                before = planes
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, num_classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        return cast(Tensor, self.classifier(self.features(x).mean((2, 3))))


@architecture
def vgg16(*, num_classes: Count = 10, in_channels: Count = 3) -> nn.Module:
    """VGG-16 with batch norm and one linear layer."""
    return VGG((2, 2, 3, 3, 3), num_classes=num_classes, in_channels=in_channels)


@architecture
def vgg19(*, num_classes: Count = 10, in_channels: Count = 3) -> nn.Module:
    """VGG-19 with batch norm and one linear layer."""
    return VGG((2, 2, 4, 4, 4), num_classes=num_classes, in_channels=in_channels)
