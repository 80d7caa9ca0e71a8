"""A convolution of single pixels with a stride as one without, of the pixels it looks at.

A residual network has one in every shortcut that makes an image smaller, and cuDNN no good kernel for it: on an H200
the first of a ResNet-18, in bfloat16, takes 56 us for 128 images, and 14 for their gradient. To pick the pixels takes
4, the plain convolution 5, and its gradient 5; a compiler puts the pixels back along with the sum that follows. Without
one that takes kernels of its own, and more time than is saved.
"""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_strided_pointwise(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a layer looks at some pixels alone, one by one."""
    return (
        type(layer) is nn.Conv2d
        and max(layer.kernel_size) == 1
        and max(layer.stride) > 1
        and layer.padding in ((0, 0), "valid")
    )


class StridedPointwiseConv(nn.Module):
    """The same layer of the same weights, another one for a compiler only."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return cast(Tensor, self.conv(x))
        down, right = self.conv.stride
        seen = x[..., ::down, ::right].contiguous(memory_format=torch.channels_last)
        return F.conv2d(seen, self.conv.weight, self.conv.bias, groups=self.conv.groups)
