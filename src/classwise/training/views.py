"""The same parameters and buffers asked in another way: two batches in one, or in bfloat16.

A view is a copy of the modules alone: what an optimizer does to the model, or a pass to its statistics, both see. Each
has modes of its own.
"""

# B batch

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from classwise.engine import fits, halves, widened
from classwise.forward import logits_of


def paired(model: nn.Module) -> nn.Module:
    """A view for two batches in one pass: every batch norm takes the halves one after the other."""
    view, own = _view(model)
    for name, norm in own.items():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            view.set_submodule(name, PairedNorm(norm))
    return view


class PairedNorm(nn.Module):
    """A batch norm that takes the two halves of a batch for two batches, one after the other."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(half) for half in x.chunk(2)])


def lowered(model: nn.Module) -> nn.Module:
    """A view whose convolutions and products are in bfloat16, but not its last layer, nor the images of its first."""
    view, own = _view(model)
    layers = [(name, layer) for name, layer in own.items() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for number, (name, layer) in enumerate(layers):
        if number == len(layers) - 1:
            view.set_submodule(name, InFloat32(layer))
        elif number == 0:
            view.set_submodule(name, HalvedConv(layer) if fits(layer) else InFloat32(layer))
    return Lowered(view)


class Lowered(nn.Module):
    """A model under autocast to bfloat16, with logits in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return logits_of(self.model(x))


class InFloat32(nn.Module):
    """A layer that is left out of an autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.float())
            return out


class HalvedConv(nn.Module):
    """A first convolution that takes all the bits of its images, half by half."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv._conv_forward(halves(x), widened(self.conv.weight), self.conv.bias)
        return out


def _view(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of the modules on the same tensors, and the copies by name, without the outermost."""
    view = copy.deepcopy(model)
    for mine, own in zip(view.modules(), model.modules(), strict=True):
        mine._parameters, mine._buffers = own._parameters, own._buffers
    return view, {name: module for name, module in view.named_modules() if name}
