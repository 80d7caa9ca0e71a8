"""GoogLeNet and Inception-v3 with stems for small images.

Szegedy et al., Going Deeper with Convolutions (CVPR 2015), table 1, and Rethinking the Inception Architecture for
Computer Vision (CVPR 2016), sections 6 and figures 5 to 7, 10. State-dict names of GoogLeNet as in the widespread
CIFAR code: ``pre_layers.0, a3.b1.0, ..., b5.b4.1, linear``.

GoogLeNet has 6,166,250 parameters for ten classes, as that code has; Inception-v3 has 21,806,058, which are
torchvision's 27,161,264 for 1,000 classes without the auxiliary head (3,326,696) and 2,028,510 of the linear layer.

Deviations of both: no auxiliary heads, which are unnecessary with batch norm; no dropout; the final pooling averages
the whole map. GoogLeNet: the stem is one 3x3 convolution to 192 planes without pooling; batch norm after every
convolution, which keeps its bias; two 3x3 convolutions instead of 5x5, as in the second paper. Inception-v3: the five
convolutions of the stem keep the size of the image, and its two poolings are omitted. The numbers of planes inside the
branches are those of the authors' code, because the paper gives only the sums.
"""

# B batch, K classes, C channels

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from classwise.models.initialization import he_normal
from classwise.models.settings import Count, architecture


class Branches(nn.ModuleDict):
    """Modules on the same input, with results concatenated along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.values()], 1)


class GoogLeNet(nn.Module):
    """GoogLeNet with batch norm, for small images: nine modules of four branches, in stages of two, five and two."""

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 3) -> None:
        super().__init__()
        self.pre_layers = nn.Sequential(*_biased(in_channels, 192, 3))
        self.a3 = _module(192, 64, (96, 128), (16, 32), 32)
        self.b3 = _module(256, 128, (128, 192), (32, 96), 64)
        self.a4 = _module(480, 192, (96, 208), (16, 48), 64)
        self.b4 = _module(512, 160, (112, 224), (24, 64), 64)
        self.c4 = _module(512, 128, (128, 256), (24, 64), 64)
        self.d4 = _module(512, 112, (144, 288), (32, 64), 64)
        self.e4 = _module(528, 256, (160, 320), (32, 128), 128)
        self.a5 = _module(832, 256, (160, 320), (32, 128), 128)
        self.b5 = _module(832, 384, (192, 384), (48, 128), 128)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.linear = nn.Linear(1024, num_classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        out = self.maxpool(self.b3(self.a3(self.pre_layers(x))))
        out = self.maxpool(self.e4(self.d4(self.c4(self.b4(self.a4(out))))))
        out = self.b5(self.a5(out))
        return cast(Tensor, self.linear(out.mean((2, 3))))


def _module(in_planes: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> Branches:
    """Build a row of table 1 from the planes of its branches; 3x3 and 5x5 branches have a reduction first."""
    return Branches(
        {
            "b1": nn.Sequential(*_biased(in_planes, one, 1)),
            "b2": nn.Sequential(*_biased(in_planes, three[0], 1), *_biased(*three, 3)),
            "b3": nn.Sequential(*_biased(in_planes, five[0], 1), *_biased(*five, 3), *_biased(five[1], five[1], 3)),
            "b4": nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *_biased(in_planes, pool, 1)),
        }
    )


def _biased(in_planes: int, planes: int, kernel: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(in_planes, planes, kernel, padding=kernel // 2)
    return conv, nn.BatchNorm2d(planes), nn.ReLU()


class InceptionV3(nn.Module):
    """Inception-v3 without auxiliary head, for small images: stages of three, four and two modules of branches."""

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _chain(in_channels, (32, 3), (32, 3), (64, 3), (80, 1), (192, 3)),
            _five(192, 32),
            _five(256, 64),
            _five(288, 64),
            _branches(
                _chain(288, (384, 3), stride=2),
                _chain(288, (64, 1), (96, 3), (96, 3), stride=2),
                nn.MaxPool2d(3, stride=2),
            ),
            *(_seven(planes) for planes in (128, 160, 160, 192)),
            _branches(
                _chain(768, (192, 1), (320, 3), stride=2),
                _chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2),
                nn.MaxPool2d(3, stride=2),
            ),
            _expanded(1280),
            _expanded(2048),
        )
        self.linear = nn.Linear(2048, num_classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        return cast(Tensor, self.linear(self.features(x).mean((2, 3))))


def _five(in_planes: int, pool: int) -> Branches:
    """Figure 5: branches with a 5x5 convolution and with two 3x3 convolutions."""
    return _branches(
        _chain(in_planes, (64, 1)),
        _chain(in_planes, (48, 1), (64, 5)),
        _chain(in_planes, (64, 1), (96, 3), (96, 3)),
        _averaged(in_planes, pool),
    )


def _seven(planes: int) -> Branches:
    """Figure 6: branches with one and two 7x7 convolutions, each factored into 1x7 and 7x1."""
    wide, high = (1, 7), (7, 1)
    return _branches(
        _chain(768, (192, 1)),
        _chain(768, (planes, 1), (planes, wide), (192, high)),
        _chain(768, (planes, 1), (planes, high), (planes, wide), (planes, high), (192, wide)),
        _averaged(768, 192),
    )


def _expanded(in_planes: int) -> Branches:
    """Figure 7: branches that split into 1x3 and 3x1 convolutions."""
    return _branches(
        _chain(in_planes, (320, 1)),
        nn.Sequential(_chain(in_planes, (384, 1)), _split()),
        nn.Sequential(_chain(in_planes, (448, 1), (384, 3)), _split()),
        _averaged(in_planes, 192),
    )


def _split() -> Branches:
    return _branches(_chain(384, (384, (1, 3))), _chain(384, (384, (3, 1))))


def _averaged(in_planes: int, planes: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _chain(in_planes, (planes, 1)))


def _branches(*branches: nn.Module) -> Branches:
    return Branches({str(number): branch for number, branch in enumerate(branches)})


def _chain(in_planes: int, *layers: tuple[int, int | tuple[int, int]], stride: int = 1) -> nn.Sequential:
    """Convolutions (planes, kernel) with batch norm and ReLU; a stride applies to the last one, without padding."""
    chain = nn.Sequential()
    for number, (planes, kernel) in enumerate(layers, start=1):
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        step = stride if number == len(layers) else 1
        padding = (high // 2, wide // 2) if step == 1 else 0
        chain.append(nn.Conv2d(in_planes, planes, (high, wide), stride=step, padding=padding, bias=False))
        chain.append(nn.BatchNorm2d(planes, eps=1e-3))
        chain.append(nn.ReLU())
        in_planes = planes
    return chain


googlenet = architecture(GoogLeNet)
inception_v3 = architecture(InceptionV3)
