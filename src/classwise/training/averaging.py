"""Averages of weights and batch-norm statistics, over all steps or over epochs with a good worst class."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassStats


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers; tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class Average:
    """An average of the models of a training."""

    gated = False
    """Whether ``on_epoch`` needs validation statistics of the trained model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.counts: dict[str, int] = {}
        """Counters, by their names in a checkpoint."""

    @property
    def model(self) -> nn.Module | None:
        """The average so far; None before the first model is included."""
        return self.average

    def on_step(self, model: nn.Module) -> None:
        """Update the average after a training step."""

    def on_epoch(self, model: nn.Module, val: ClassStats) -> None:
        """Update the average after an epoch with the validation statistics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"model": self.average.state_dict(), **self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.average.load_state_dict(state["model"])
        self.counts = {name: state[name] for name in self.counts}


class WeightAverage(Average):
    """Exponential moving average over steps.

    w_avg ← d · w_avg + (1 - d) · w after step t = 0, 1, ..., with d = min(decay, t / (t + 9)). With a constant d, the
    average would mostly consist of the random initial weights during the first epochs; its class statistics would be
    noise, which policies that accumulate statistics never forget.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay, self.counts = decay, {"updates": 0}

    def on_step(self, model: nn.Module) -> None:
        updates = self.counts["updates"]
        _mix(self.average, model, 1 - min(self.decay, updates / (updates + 9)))
        self.counts["updates"] += 1


@dataclass(frozen=True, kw_only=True)
class FAWASettings:
    """Settings of fairness-aware weight averaging."""

    decay: Number = 0.85
    threshold: Number = 0.2
    """Minimum robust accuracy of the worst class, as a fraction, for an epoch to be included."""
    begin: int = 1
    """The first epoch that may be included."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"decay must lie in [0, 1), got {self.decay}")
        if not 0 <= self.threshold <= 1:
            raise InputError(f"threshold must lie in [0, 1], got {self.threshold}")
        if self.begin < 1:
            raise InputError(f"begin must be at least 1, got {self.begin}")


class FAWA(Average):
    """Fairness-aware weight averaging (Wei et al. 2023, Section 4.3).

    w_avg ← d · w_avg + (1 - d) · w after every epoch whose worst class reaches the threshold.

    Deviations
    * Before the first epoch is included there is no average, and the trained model is used; the authors' code evaluates
      the random initial weights.
    * The paper begins at epoch 50, the authors' code at the first epoch; here it is a setting.
    """

    gated = True

    def __init__(self, model: nn.Module, settings: FAWASettings) -> None:
        super().__init__(model)
        self.settings, self.counts = settings, {"epochs": 0, "included": 0}

    @property
    def model(self) -> nn.Module | None:
        return self.average if self.counts["included"] else None

    def on_epoch(self, model: nn.Module, val: ClassStats) -> None:
        """Include the current weights if their worst class reaches the threshold."""
        self.counts["epochs"] += 1
        # In float64, so that 24 of 100 is not less than 0.24.
        shares = (val.correct_adv.double() / val.n_adv)[val.n_adv > 0]
        early = self.counts["epochs"] < self.settings.begin
        if early or not len(shares) or float(shares.min()) < self.settings.threshold:
            return
        _mix(self.average, model, 1 - self.settings.decay if self.counts["included"] else 1.0)
        self.counts["included"] += 1


@torch.no_grad()
def _mix(average: nn.Module, model: nn.Module, share: float) -> None:
    """Move an average towards a model by ``share``; integer buffers are copied."""
    pairs = [(mine, current) for (_, mine), (_, current) in zip(_tensors(average), _tensors(model), strict=True)]
    smooth = [pair for pair in pairs if pair[0].is_floating_point()]
    counters = [pair for pair in pairs if not pair[0].is_floating_point()]
    torch._foreach_lerp_([mine for mine, _ in smooth], [current for _, current in smooth], share)
    if counters:
        torch._foreach_copy_([mine for mine, _ in counters], [current for _, current in counters])
