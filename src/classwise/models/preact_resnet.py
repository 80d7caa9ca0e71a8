"""ResNet with batch norm and ReLU before each convolution, for small images.

He et al., Identity Mappings in Deep Residual Networks (ECCV 2016). State-dict names as in the CIFAR code
that "Fast is better than free" (Wong et al., ICLR 2020) and "Overfitting in adversarially robust deep
learning" (Rice et al., ICML 2020) build on: ``conv1, layer1.0.bn1, layer1.0.conv1, ...,
layer2.0.shortcut.0, bn, linear``.

Two variants are in use. The paper, Wong et al. and Rice et al. apply batch norm and ReLU after the last block (``bn``);
the widely used CIFAR code does not. The setting ``final_bn`` selects the variant; checkpoints of the other one do not
load.
"""

# B batch, K classes, C channels

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.settings import Count, architecture


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU.

    If the shape changes, the shortcut is a 1x1 convolution of the *activated* input, else the input itself.
    """

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual = x if self.shortcut is None else self.shortcut(active)
        out = self.conv1(active)
        return cast(Tensor, self.conv2(F.relu(self.bn2(out))) + residual)


class PreActResNet(nn.Module):
    """Four stages of pre-activation blocks with 64, 128, 256 and 512 planes."""

    def __init__(
        self, blocks: Sequence[int], *, num_classes: int = 10, in_channels: int = 3, final_bn: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, blocks[0], 1)
        self.layer2 = _stage(64, 128, blocks[1], 2)
        self.layer3 = _stage(128, 256, blocks[2], 2)
        self.layer4 = _stage(256, 512, blocks[3], 2)
        self.bn = nn.BatchNorm2d(512) if final_bn else None
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        if self.bn is not None:
            out = F.relu(self.bn(out))
        return cast(Tensor, self.linear(out.mean((2, 3))))


def _stage(in_planes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    """Return a sequence of blocks; the first one changes planes and size."""
    first = PreActBlock(in_planes, planes, stride)
    return nn.Sequential(first, *(PreActBlock(planes, planes, 1) for _ in range(blocks - 1)))


@architecture
def preact_resnet18(*, num_classes: Count = 10, in_channels: Count = 3, final_bn: bool = True) -> nn.Module:
    """Pre-activation ResNet-18 for small images."""
    return PreActResNet((2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, final_bn=final_bn)
