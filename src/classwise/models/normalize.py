"""Normalization as a part of the model, so that images are in [0, 1] and eps has the same unit for all models."""

# B batch, C channels, H height, W width

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from classwise.core.errors import InputError, unknown

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # Over all training pixels. The standard deviations (0.2023, 0.1994, 0.2010) of many CIFAR-10 scripts are averages
    # over images; a model trained with them needs ``normalized`` with these numbers.
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
}
"""Mean and standard deviation of each channel, for inputs in [0, 1]."""


class Normalize(nn.Module):
    """``(x - mean) / std`` for each channel. Both are buffers: saved with the weights, not trained."""

    mean: Tensor
    """(C, 1, 1)"""
    std: Tensor
    """(C, 1, 1)"""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if not mean or len(mean) != len(std):
            raise InputError(f"mean {tuple(mean)} and std {tuple(std)}; expected one number per channel in each")
        values = torch.tensor([list(mean), list(std)], dtype=torch.float32)
        if not bool(values.isfinite().all()) or not bool((values[1] > 0).all()):
            raise InputError(
                f"mean {tuple(mean)}, std {tuple(std)}; expected finite means and positive standard deviations"
            )
        self.register_buffer("mean", values[0].reshape(-1, 1, 1).clone())
        self.register_buffer("std", values[1].reshape(-1, 1, 1).clone())

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


class Normalized(nn.Module):
    """A normalization followed by a model, whose names in the state dict get the prefix ``model.``."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(self.normalize(x)))


def normalized(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> Normalized:
    """Add a normalization to a model that was trained on normalized images."""
    return Normalized(model, mean, std)


def with_normalization(model: nn.Module, name: str | None, in_channels: int) -> nn.Module:
    """Add a named normalization to a model; None returns the model unchanged."""
    if name is None:
        return model
    if name not in NORMALIZATIONS:
        raise unknown("normalization", name, NORMALIZATIONS)
    mean, std = NORMALIZATIONS[name]
    if len(mean) != in_channels:
        raise InputError(f"normalize={name} is for {len(mean)} channels, but the model has in_channels={in_channels}")
    return normalized(model, mean, std)
