"""MobileNetV2 for small images, as in the CIFAR code.

Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks (CVPR 2018), tables 1 and 2. State-dict names as
in the widely used CIFAR code: ``conv1, bn1, layers.0.conv1, ..., layers.0.shortcut.0, ..., conv2, bn2, linear``.

2,296,922 parameters for ten classes, as that code has: the 2,236,682 of torchvision's layers with ten classes
(3,504,872 with a thousand), 59,152 in four shortcuts and 1,088 in the expansion of the first block.

Deviations, all as in the CIFAR code, so that its checkpoints give the same logits: stride 1 in the stem and in the
first block of 24 planes; ReLU instead of ReLU6; a 1x1 convolution with batch norm as the shortcut of blocks that keep
the size but change the number of planes (the paper has none); an expansion by the factor 1 in the first block; no
dropout.
"""

# B batch, K classes, C channels

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.initialization import he_normal
from classwise.models.settings import Count, architecture

ROWS = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2: expansion, planes, blocks and the stride of the first of them."""


class InvertedResidual(nn.Module):
    """A 1x1 expansion, a depthwise 3x3 convolution, and a 1x1 projection without ReLU."""

    def __init__(self, in_planes: int, planes: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * in_planes
        self.conv1 = nn.Conv2d(in_planes, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.conv3 = nn.Conv2d(wide, planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Sequential | None = None
        if stride == 1:
            changed = [nn.Conv2d(in_planes, planes, 1, bias=False), nn.BatchNorm2d(planes)]
            self.shortcut = nn.Sequential(*(changed if in_planes != planes else []))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return cast(Tensor, out if self.shortcut is None else out + self.shortcut(x))


class MobileNetV2(nn.Module):
    """MobileNetV2 for small images: a 3x3 convolution, 17 inverted residuals, a 1x1 convolution to 1,280 planes."""

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.layers = nn.Sequential()
        before = 32
        for expansion, planes, blocks, stride in ROWS:
            for number in range(blocks):
                self.layers.append(InvertedResidual(before, planes, expansion, stride if number == 0 else 1))
                before = planes
        self.conv2 = nn.Conv2d(before, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.linear = nn.Linear(1280, num_classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(self.layers(out))))
        return cast(Tensor, self.linear(out.mean((2, 3))))


mobilenet_v2 = architecture(MobileNetV2)
