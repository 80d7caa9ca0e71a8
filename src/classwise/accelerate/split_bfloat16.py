"""Input images of a bfloat16 convolution as two bfloat16 parts: the rounded pixel and the remainder.

Plain rounding changes a pixel by up to 1/16 of the usual radius and maps natural and slightly perturbed images to the
same grid, so a search that starts next to the image would get the logits of the grid points only.
"""

# B batch, C channels

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

WIDE = 8
"""Number of input channels that a tensor core processes at once."""


BITS = -(1 << 16)
"""Mask of the float32 bits that bfloat16 keeps."""


def can_split_input(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a first layer supports split input images."""
    return isinstance(layer, nn.Conv2d) and layer.groups == 1 and 2 * layer.in_channels <= WIDE


def split_input(x: Tensor) -> Tensor:
    """Split float32 images (B, C, H, W) into bfloat16 halves, padded with zeros to (B, WIDE, H, W).

    The gradient flows through the first half only. The first half is computed with a bit mask, because a compiler
    removes a cast to bfloat16 and back.
    """
    rest = x.detach() - (x.detach().view(torch.int32) & BITS).view(torch.float32)
    unused = x.new_zeros(len(x), WIDE - 2 * x.shape[1], *x.shape[2:])
    wide = torch.cat([x - rest, rest, unused], 1).to(torch.bfloat16)
    return wide.contiguous(memory_format=torch.channels_last)


def split_weight(weight: Tensor) -> Tensor:
    """Return the weight (out, C, h, w) of a convolution repeated for both halves, (out, WIDE, h, w)."""
    unused = weight.new_zeros(len(weight), WIDE - 2 * weight.shape[1], *weight.shape[2:])
    return torch.cat([weight, weight, unused], 1)
