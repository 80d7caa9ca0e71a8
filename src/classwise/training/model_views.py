"""Views of a model with another forward pass: two batches in one pass, batch norm across processes, or bfloat16.

A view copies the modules and shares parameters and buffers with the model, so that optimizer steps and batch-norm
updates affect both. Training and evaluation mode are separate.
"""

# B batch

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.accelerate import StridedPointwiseConv, can_split_input, is_strided_pointwise, split_input, split_weight
from classwise.core.model_calls import logits_of
from classwise.training.distributed import ProcessGroup, differentiable_sum


def paired_view(model: nn.Module) -> nn.Module:
    """Return a view for two batches concatenated in one pass: batch norms process the halves one after the other."""
    return _with_norms(model, PairedNorm)


class PairedNorm(nn.Module):
    """A batch norm that processes the two halves of its input as two batches, one after the other."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(half) for half in x.chunk(2)])


def synchronized_view(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Return a view whose batch norms, in training mode, normalize over the batches of all processes."""
    return _with_norms(model, lambda norm: SynchronizedNorm(norm, group))


class SynchronizedNorm(nn.Module):
    """A batch norm over the batches of all processes in training mode, and a plain one in evaluation mode."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, group: ProcessGroup) -> None:
        super().__init__()
        self.norm, self.group = norm, group

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            out: Tensor = norm(x)
            return out
        mean, variance, count = self.moments(x)
        if norm.track_running_stats:
            self.update_statistics(mean.detach(), variance.detach() * (count / (count - 1)))
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = (variance + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight)
        centered = (x - mean.view(shape)) * scale.view(shape)
        return (centered if norm.bias is None else centered + norm.bias.view(shape)).to(x.dtype)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean and variance (C,) of each channel over all processes, and the number of values."""
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
        own = torch.cat([mean, variance, mean.new_full((1,), wide[:, 0].numel())])
        before, after = self.group.rank, self.group.size - 1 - self.group.rank
        # Each process contributes its row and zeros elsewhere: the sum holds all rows and is differentiable.
        rows = differentiable_sum(F.pad(own[None], (0, 0, before, after)))
        (means, variances), counts = rows[:, :-1].chunk(2, 1), rows[:, -1:].detach()
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        return mean, (counts * (variances + (means - mean).square())).sum(0) / total, total

    @torch.no_grad()
    def update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = 1 / norm.num_batches_tracked.to(mean) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean, share)
        norm.running_var.lerp_(variance, share)


def bfloat16_view(model: nn.Module) -> nn.Module:
    """Return a view whose convolutions and products are in bfloat16, except the last layer and the input images."""
    view, modules = _view(model)
    layers = [(name, layer) for name, layer in modules.items() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for number, (name, layer) in enumerate(layers):
        if number == len(layers) - 1:
            view.set_submodule(name, InFloat32(layer))
        elif number == 0:
            view.set_submodule(name, SplitInputConv(layer) if can_split_input(layer) else InFloat32(layer))
        elif is_strided_pointwise(layer):
            view.set_submodule(name, StridedPointwiseConv(layer))
    return AutocastModel(view)


class AutocastModel(nn.Module):
    """A model under bfloat16 autocast, with logits in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return logits_of(self.model(x))


class InFloat32(nn.Module):
    """A layer in float32 within an autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.float())
            return out


class SplitInputConv(nn.Module):
    """A first convolution in bfloat16 whose input keeps float32 precision, as two bfloat16 parts."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv._conv_forward(split_input(x), split_weight(self.conv.weight), self.conv.bias)
        return out


def _with_norms(model: nn.Module, replace: Callable[[nn.modules.batchnorm._BatchNorm], nn.Module]) -> nn.Module:
    """Return a view with other batch norms."""
    view, modules = _view(model)
    for name, norm in modules.items():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            view.set_submodule(name, replace(norm))
    return view


def _view(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return a copy of the modules that shares their tensors, and its submodules by name."""
    view = copy.deepcopy(model)
    for copied, original in zip(view.modules(), model.modules(), strict=True):
        copied._parameters, copied._buffers = original._parameters, original._buffers
    return view, {name: module for name, module in view.named_modules() if name}
