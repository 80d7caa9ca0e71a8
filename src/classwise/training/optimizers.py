"""Optimizers by name, as settings that are validated before a model exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from classwise.config.spec import Number
from classwise.core.errors import InputError


class OptimizerSettings(Protocol):
    """Settings of an optimizer."""

    @property
    def lr(self) -> float: ...

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSettings):
    """Stochastic gradient descent with momentum."""

    lr: Number = 0.1
    momentum: Number = 0.9
    weight_decay: Number = 2e-4
    decay_vectors: bool = True
    """Whether weight decay also applies to biases and batch norms."""
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs a momentum above 0")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD(
            parameters if self.decay_vectors else _groups(parameters),
            fused=_on_gpu(parameters),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSettings):
    """Adam with decoupled weight decay (AdamW)."""

    lr: Number = 1e-3
    weight_decay: Number = 0.0
    decay_vectors: bool = True
    """Whether weight decay also applies to biases and batch norms."""

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = parameters if self.decay_vectors else _groups(parameters)
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=_on_gpu(parameters))


OPTIMIZERS: Mapping[str, type[OptimizerSettings]] = {"sgd": SGD, "adam": Adam}


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups; the second, of one-dimensional parameters, has no weight decay."""
    matrices, vectors = ([one for one in parameters if (one.dim() > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _on_gpu(parameters: list[nn.Parameter]) -> bool:
    """Return whether the fused optimizer kernel can be used."""
    return all(parameter.is_cuda for parameter in parameters)


def _check(lr: float, weight_decay: float) -> None:
    if lr <= 0:
        raise InputError(f"lr must be positive, got {lr}")
    if weight_decay < 0:
        raise InputError(f"weight_decay must not be negative, got {weight_decay}")
