"""DenseNet with the stem for small images: a 3x3 convolution, no batch norm after it and no max-pool.

Huang et al., Densely Connected Convolutional Networks (CVPR 2017), table 1: DenseNet-BC with growth 32 and
compression 1/2. State-dict names as in the widely used CIFAR code: ``conv1, dense1.0.bn1, ..., trans1.conv, ..., bn,
linear``.

6,956,298 (121) and 12,493,322 (169) parameters for ten classes. With a stem of 7x7 and its batch norm (9,536 parameters
instead of 1,728) and 1,000 classes these are torchvision's 7,978,856 and 14,149,480.

Deviations: the stem. The final pooling averages the whole map, which is 4x4 for 32x32 images.
"""

# B batch, K classes, C channels

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.initialization import he_normal
from classwise.models.settings import Count, architecture

GROWTH = 32
"""The number of planes that each layer adds."""


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution, each after batch norm and ReLU; the result is concatenated to the input."""

    def __init__(self, in_planes: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, 4 * GROWTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * GROWTH)
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([out, x], 1)  # the order of the CIFAR code, on which checkpoints depend


class Transition(nn.Module):
    """Halve the number of planes and the size."""

    def __init__(self, in_planes: int, planes: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_planes)
        self.conv = nn.Conv2d(in_planes, planes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """Four dense blocks with transitions between them; ``layers`` is the number of layers of each block."""

    def __init__(self, layers: Sequence[int], *, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        entering = [2 * GROWTH]  # the input planes of each block; the transition before it has twice as many
        for repeated in layers:
            entering.append((entering[-1] + repeated * GROWTH) // 2)
        first, second, third, fourth, half = entering
        self.conv1 = nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        self.dense1 = _block(first, layers[0])
        self.trans1 = Transition(2 * second, second)
        self.dense2 = _block(second, layers[1])
        self.trans2 = Transition(2 * third, third)
        self.dense3 = _block(third, layers[2])
        self.trans3 = Transition(2 * fourth, fourth)
        self.dense4 = _block(fourth, layers[3])
        self.bn = nn.BatchNorm2d(2 * half)
        self.linear = nn.Linear(2 * half, num_classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = self.trans1(self.dense1(self.conv1(x)))
        out = self.trans3(self.dense3(self.trans2(self.dense2(out))))
        out = F.relu(self.bn(self.dense4(out)))
        return cast(Tensor, self.linear(out.mean((2, 3))))


def _block(in_planes: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(DenseLayer(in_planes + number * GROWTH) for number in range(layers)))


@architecture
def densenet121(*, num_classes: Count = 10, in_channels: Count = 3) -> nn.Module:
    """DenseNet-121 for small images."""
    return DenseNet((6, 12, 24, 16), num_classes=num_classes, in_channels=in_channels)


@architecture
def densenet169(*, num_classes: Count = 10, in_channels: Count = 3) -> nn.Module:
    """DenseNet-169 for small images."""
    return DenseNet((6, 12, 32, 32), num_classes=num_classes, in_channels=in_channels)
