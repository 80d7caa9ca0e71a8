"""ResNet with a stem for small images (a 3x3 convolution without max-pooling), or with that of the paper.

He et al., Deep Residual Learning for Image Recognition (CVPR 2016). State-dict names as in the CIFAR code
that TRADES and most papers of the field use: ``conv1, bn1, layer1.0.conv1, ..., layer2.0.shortcut.0, ...,
linear``.

11,173,962 (18), 21,282,122 (34) and 23,520,842 (50) parameters for ten classes, as in that code. With
``stem=imagenet`` and 1,000 classes: 11,689,512, 21,797,672 and 25,557,032, as in torchvision.

Deviations: the stem, unless ``stem=imagenet`` (7x7 with stride 2, then 3x3 max-pooling with stride 2). The final
pooling averages the whole map, which for 32x32 images with the small stem is the CIFAR code's 4x4 average. The
bottleneck has its stride in the 3x3 convolution, as in later code.
"""

# B batch, K classes, C channels

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.settings import Count, architecture

Stem = Literal["small", "imagenet"]
"""The layers before the first block: ``small`` keeps the size of the image, ``imagenet`` reduces it to a quarter."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = _shortcut(in_planes, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the 3x3 convolution has the stride."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.shortcut = _shortcut(in_planes, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of residual blocks with 64, 128, 256 and 512 planes."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Stem = "small",
    ) -> None:
        super().__init__()
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else None
        self.layer1 = _stage(block, 64, 64, blocks[0], 1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], 2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], 2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], 2)
        self.linear = nn.Linear(512 * block.expansion, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = F.relu(self.bn1(self.conv1(x)))
        if self.pool is not None:
            out = self.pool(out)
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return cast(Tensor, self.linear(out.mean((2, 3))))


def _shortcut(in_planes: int, out_planes: int, stride: int) -> nn.Sequential:
    """Return the identity if the shapes agree, else a 1x1 convolution with batch norm."""
    if stride == 1 and in_planes == out_planes:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(in_planes, out_planes, 1, stride=stride, bias=False), nn.BatchNorm2d(out_planes))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_planes: int, planes: int, blocks: int, stride: int
) -> nn.Sequential:
    """Return a sequence of blocks; the first one changes planes and size."""
    first = block(in_planes, planes, stride)
    return nn.Sequential(first, *(block(planes * block.expansion, planes, 1) for _ in range(blocks - 1)))


@architecture
def resnet18(*, num_classes: Count = 10, in_channels: Count = 3, stem: Stem = "small") -> nn.Module:
    """ResNet-18 for small images, or with the stem of the paper."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, stem=stem)


@architecture
def resnet34(*, num_classes: Count = 10, in_channels: Count = 3, stem: Stem = "small") -> nn.Module:
    """ResNet-34 for small images, or with the stem of the paper."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels, stem=stem)


@architecture
def resnet50(*, num_classes: Count = 10, in_channels: Count = 3, stem: Stem = "small") -> nn.Module:
    """ResNet-50 for small images, or with the stem of the paper."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels, stem=stem)
