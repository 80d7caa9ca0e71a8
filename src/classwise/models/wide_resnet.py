"""Wide ResNet for small images.

Zagoruyko and Komodakis, Wide Residual Networks (BMVC 2016). State-dict names as in the code of TRADES
(Zhang et al., ICML 2019): ``conv1, block1.layer.0.bn1, ..., block1.layer.0.convShortcut, ..., bn1, fc``.

36,479,194 (28-10) and 46,160,474 (34-10) parameters for ten classes. The paper counts 6n + 4 layers, three of them in
shortcuts; Madry et al. (ICLR 2018) count 6n + 2, so that their WRN-32-10 has the blocks of WRN-34-10. Both are
accepted.

Deviations: the original's ``sub_block1``, which its forward pass does not use, is omitted here and ignored in
checkpoints. The final pooling averages the whole map, which for 32x32 images is the original's 8x8 average.
"""

# B batch, K classes, C channels

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError
from classwise.models.settings import Count, Probability, architecture


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, with dropout between them.

    If the number of planes changes, the shortcut is a 1x1 convolution of the *activated* input, else the input itself.
    """

    def __init__(self, in_planes: int, out_planes: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, out_planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_planes)
        self.conv2 = nn.Conv2d(out_planes, out_planes, 3, padding=1, bias=False)
        self.dropout = dropout
        self.convShortcut: nn.Conv2d | None = None
        if in_planes != out_planes:
            self.convShortcut = nn.Conv2d(in_planes, out_planes, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual = x if self.convShortcut is None else self.convShortcut(active)
        out = F.relu(self.bn2(self.conv1(active)))
        if self.dropout > 0:
            out = F.dropout(out, p=self.dropout, training=self.training)
        return cast(Tensor, self.conv2(out) + residual)


class WideStage(nn.Module):
    """A sequence of blocks; the first one changes planes and size."""

    def __init__(self, blocks: int, in_planes: int, out_planes: int, stride: int, dropout: float) -> None:
        super().__init__()
        first = WideBlock(in_planes, out_planes, stride, dropout)
        others = (WideBlock(out_planes, out_planes, 1, dropout) for _ in range(blocks - 1))
        self.layer = nn.Sequential(first, *others)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x))


class WideResNet(nn.Module):
    """Wide ResNet of depth 6n + 4 (or 6n + 2): WRN-34-10 is depth=34, width=10.

    Three stages of (depth - 4) / 6 blocks, rounded up, with 16, 32 and 64 times ``width`` planes.
    """

    def __init__(
        self,
        *,
        depth: Count = 34,
        width: Count = 10,
        num_classes: Count = 10,
        in_channels: Count = 3,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        blocks, uncounted = divmod(depth - 2, 6)
        if uncounted not in (0, 2) or blocks < 1:
            raise InputError(
                f"wide-resnet: depth={depth}; expected 6n + 4, such as 28, 34 or 70, or 6n + 2, such as 32"
            )
        planes = (16, 16 * width, 32 * width, 64 * width)
        self.conv1 = nn.Conv2d(in_channels, planes[0], 3, padding=1, bias=False)
        self.block1 = WideStage(blocks, planes[0], planes[1], 1, dropout)
        self.block2 = WideStage(blocks, planes[1], planes[2], 2, dropout)
        self.block3 = WideStage(blocks, planes[2], planes[3], 2, dropout)
        self.bn1 = nn.BatchNorm2d(planes[3])
        self.fc = nn.Linear(planes[3], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = self.block3(self.block2(self.block1(self.conv1(x))))
        out = F.relu(self.bn1(out))
        return cast(Tensor, self.fc(out.mean((2, 3))))


wide_resnet = architecture(WideResNet)
