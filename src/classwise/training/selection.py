"""Selection of the best epoch by the validation split, and the guard against catastrophic overfitting.

Catastrophic overfitting occurs in training with a one-step attack (Wong et al. 2020, Section 4): within an epoch the
model learns to fool the single step it is trained with, and accuracy under a stronger attack falls to zero while the
training loss improves. The validation attack detects it.
"""

# K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from classwise.config.spec import Number
from classwise.core.choices import Rule
from classwise.core.errors import InputError
from classwise.core.types import ClassStats

MAX_STEP_FACTOR = 16
"""Maximum multiple of the recipe's attack steps. A collapse at this number of steps has another cause."""


def score(rule: Rule, val: ClassStats) -> float:
    """Return the score of an epoch; larger is better. Classes without validation examples are ignored."""
    return _SCORES[rule](val)


def _average(correct: Tensor, n: Tensor) -> float:
    return float(correct.sum() / n.sum())


def _worst(shares: Tensor) -> float:
    return float(shares[~shares.isnan()].min())


def _worst_loss(val: ClassStats) -> float:
    present = val.n > 0
    return -float((val.loss[present] / val.n[present]).max())


_SCORES: dict[Rule, Callable[[ClassStats], float]] = {
    "robust+worst": lambda val: _average(val.correct_adv, val.n_adv) + _worst(val.robust),
    "robust": lambda val: _average(val.correct_adv, val.n_adv),
    "worst": lambda val: _worst(val.robust),
    "worst-loss": _worst_loss,
    "natural": lambda val: _average(val.correct_nat, val.n_nat),
    "last": lambda val: 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Definition of a collapse of robust accuracy, and the reaction to it."""

    drop: Number = 0.2
    """Largest accepted drop of robust validation accuracy below its best value, as a fraction."""
    action: Literal["stop", "back"] = "stop"
    """``stop`` training, or go ``back`` to the best epoch and double the steps of the attack, at most four times."""

    def __post_init__(self) -> None:
        if not 0 < self.drop < 1:
            raise InputError(f"drop must be a fraction between 0 and 1, got {self.drop}")

    def collapsed(self, robust: float, best: float) -> bool:
        """Return whether robust accuracy has fallen too far below its best."""
        return robust < best - self.drop
