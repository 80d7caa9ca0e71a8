"""Input images of a bfloat16 convolution as two bfloat16 parts: the rounded pixel and the remainder.

Plain rounding changes a pixel by up to 1/16 of the usual radius and maps natural and slightly perturbed images to the
same grid, so that a search that starts next to the image would see only the grid.
"""

# B batch, C channels

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

WIDE = 8
"""Input channels that a tensor core takes at once."""


BITS = -(1 << 16)
"""The bits of a float32 that a bfloat16 has."""


def can_split_input(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a first layer can take images so."""
    return isinstance(layer, nn.Conv2d) and layer.groups == 1 and 2 * layer.in_channels <= WIDE


def split_input(x: Tensor) -> Tensor:
    """(B, C, H, W) float32 to (B, WIDE, H, W) bfloat16: the two halves and zeros. The gradient takes the first.

    The first half is cut off by its bits: of a cast to and fro a compiler makes nothing at all.
    """
    rest = x.detach() - (x.detach().view(torch.int32) & BITS).view(torch.float32)
    unused = x.new_zeros(len(x), WIDE - 2 * x.shape[1], *x.shape[2:])
    wide = torch.cat([x - rest, rest, unused], 1).to(torch.bfloat16)
    return wide.contiguous(memory_format=torch.channels_last)


def split_weight(weight: Tensor) -> Tensor:
    """The weight (out, C, h, w) of a convolution for both halves: (out, WIDE, h, w)."""
    unused = weight.new_zeros(len(weight), WIDE - 2 * weight.shape[1], *weight.shape[2:])
    return torch.cat([weight, weight, unused], 1)
