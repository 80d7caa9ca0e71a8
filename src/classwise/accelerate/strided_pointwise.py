"""A strided 1x1 convolution as a plain one on the selected pixels.

Residual networks have one in every downsampling shortcut, and cuDNN has no good kernel for it: on an H200, the first
one of a ResNet-18 in bfloat16 takes 56 us for 128 images and 14 us for their gradient. Selecting pixels takes 4 us, the
plain convolution 5 us and its gradient 5 us. torch.compile fuses the scatter of the gradient with the sum that follows;
without it, the separate kernels cost more than is saved.
"""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_strided_pointwise(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a layer is a strided 1x1 convolution without padding."""
    return (
        type(layer) is nn.Conv2d
        and max(layer.kernel_size) == 1
        and max(layer.stride) > 1
        and layer.padding in ((0, 0), "valid")
    )


class StridedPointwiseConv(nn.Module):
    """The given convolution; under torch.compile, a plain convolution on the selected pixels."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return cast(Tensor, self.conv(x))
        down, right = self.conv.stride
        pixels = x[..., ::down, ::right].contiguous(memory_format=torch.channels_last)
        return F.conv2d(pixels, self.conv.weight, self.conv.bias, groups=self.conv.groups)
