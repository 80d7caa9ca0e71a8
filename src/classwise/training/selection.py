"""Selection of the best epoch by the validation split."""

# K classes

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from classwise.core.choices import Rule
from classwise.core.types import ClassStats


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
