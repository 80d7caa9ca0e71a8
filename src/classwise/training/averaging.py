"""Averages of weights and batch-norm statistics: over all steps, or over epochs whose worst class is good enough."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassStats


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class Average(Protocol):
    """A model made of the models of a training."""

    gated: bool
    """Whether it wants the validation statistics of the trained model itself."""

    @property
    def model(self) -> nn.Module | None:
        """The average so far, where there is one."""

    def on_step(self, model: nn.Module) -> None:
        """A step was made."""

    def on_epoch(self, model: nn.Module, val: ClassStats) -> None:
        """An epoch was made, after which the model does so well."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""


class WeightAverage:
    """w_avg ← d · w_avg + (1 - d) · w after every step, where d grows to ``decay`` as min(decay, t / (t + 9)).

    Without the growth the average consists of the random initial weights for the first epochs, its class statistics
    are noise, and a policy that adds them up for good never recovers from them.
    """

    gated = False

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    def on_step(self, model: nn.Module) -> None:
        """Take in the present weights."""
        _mix(self.model, model, 1 - min(self.decay, self.updates / (self.updates + 9)))
        self.updates += 1

    def on_epoch(self, model: nn.Module, val: ClassStats) -> None:
        """Nothing: it lives by steps."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


@dataclass(frozen=True, kw_only=True)
class FAWASettings:
    """Fairness-aware weight averaging."""

    decay: Number = 0.85
    threshold: Number = 0.2
    """The least robust accuracy of the worst class, as a fraction, with which an epoch is let in."""
    begin: int = 1
    """The first epoch that may be let in."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"decay must lie in [0, 1), got {self.decay}")
        if not 0 <= self.threshold <= 1:
            raise InputError(f"threshold is a fraction of one, got {self.threshold}")
        if self.begin < 1:
            raise InputError(f"begin counts epochs from 1, got {self.begin}")


class FAWA:
    """w_avg ← d · w_avg + (1 - d) · w after every epoch whose worst class holds (Wei et al. 2023, Section 4.3).

    Deviations
    * Before an epoch was let in there is no average, and the trained model stands for it; the authors' code evaluates
      the random weights it began with.
    * The paper begins with epoch 50, the authors' code with the first; here it is a setting.
    """

    gated = True

    def __init__(self, model: nn.Module, settings: FAWASettings) -> None:
        self.settings, self.epochs, self.admitted = settings, 0, 0
        self.average = copy.deepcopy(model).eval().requires_grad_(False)

    @property
    def model(self) -> nn.Module | None:
        return self.average if self.admitted else None

    def on_step(self, model: nn.Module) -> None:
        """Nothing: it lives by epochs."""

    def on_epoch(self, model: nn.Module, val: ClassStats) -> None:
        """Take in the present weights, if the worst class is good enough with them."""
        self.epochs += 1
        shares = (val.correct_adv.double() / val.n_adv)[val.n_adv > 0]  # 24 of 100 must not be less than 0.24
        if self.epochs < self.settings.begin or not len(shares) or float(shares.min()) < self.settings.threshold:
            return
        _mix(self.average, model, 1 - self.settings.decay if self.admitted else 1.0)
        self.admitted += 1

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.average.state_dict(), "epochs": self.epochs, "admitted": self.admitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average.load_state_dict(state["model"])
        self.epochs, self.admitted = state["epochs"], state["admitted"]


@torch.no_grad()
def _mix(average: nn.Module, model: nn.Module, share: float) -> None:
    """Move an average towards a model by a share; counters are copied."""
    pairs = [(mine, current) for (_, mine), (_, current) in zip(_tensors(average), _tensors(model), strict=True)]
    smooth = [pair for pair in pairs if pair[0].is_floating_point()]
    counters = [pair for pair in pairs if not pair[0].is_floating_point()]
    torch._foreach_lerp_([mine for mine, _ in smooth], [current for _, current in smooth], share)
    if counters:
        torch._foreach_copy_([mine for mine, _ in counters], [current for _, current in counters])
