"""Fair robust learning (Xu et al. 2021): no class may be much worse than the average, by Lagrange multipliers.

With the natural error and the boundary error of class k on validation, clean_k = 1 − natural_k and
bndy_k = natural_k − robust_k, and their excess over the mean, g0_k = clean_k − mean clean − delta and g1_k likewise,

    lam0 ← max(0, lam0 + rate · g0),   lam1 ← max(0, lam1 + 2 · rate · g1),   each scaled to a sum of at most ``limit``,
    w_k = 1/K + (1 − 1/K) · lam_k − 1/K · Σ_{j≠k} lam_j,   lam0 for the natural term, lam1 for the adversarial one.

Reweighting (RW) stops here. With re-margining (RM) the radius of a class grows with its boundary error:

    lam2 ← lam2 + rate_eps · g1,   eps_k = eps · exp(2 · lam2_k), within [0.98, max_scale] · eps.

Deviations
* The loss carries K · w_k, whose mean over the classes is one; the authors divide by the weights of each batch.
* w_k is negative only where ``limit`` is above one. It is then floored at 0, and the weights scaled back to mean one.
* The authors measure before every epoch, so their first is weighted already; here the first epoch is uniform.
* lam2 stays within the bounds of the radius. Theirs runs on beyond, and takes as many epochs to come back.
* The rate is constant: theirs is halved every 40 epochs, and they train for 40.
* Means are over the classes that are in training and in validation; the others keep their multipliers.
* The step of the attack goes with the radius of each class; the authors' is the same for all in a batch.
* beta is the objective's; the authors use 1.5.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Policy, Task

MIN_SCALE = 0.98


@dataclass(kw_only=True)
class FRLReweight(Policy):
    """Lagrange multipliers on natural and boundary errors above the mean, as class weights."""

    paper: ClassVar[str] = "Xu et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.natural", "val.robust")
    fine_tunes: ClassVar[bool] = True

    delta: Number = 0.1
    """How far above the mean an error may be."""
    rate: Number = 0.05
    """Rate of the multipliers of the weights."""
    limit: Number = 0.5
    """The most that the multipliers of one term may sum to."""
    lam0: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    lam1: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    lam2: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    """(K,) multipliers of the natural error, of the boundary error, and logarithms of the radius, halved."""

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise InputError(f"delta must not be negative, got {self.delta}")
        for name in ("rate", "limit"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be positive, got {getattr(self, name)}")

    def start(self, task: Task) -> ClassControls:
        self.lam0, self.lam1, self.lam2 = torch.zeros(3, task.num_classes, dtype=torch.float64).unbind()
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        natural, robust = val.natural.double(), val.robust.double()
        trained = train.n > 0
        judged = trained & natural.isfinite() & robust.isfinite()
        boundary = self.excess(natural - robust, judged)
        self.lam0 = self.limited(self.lam0 + self.rate * self.excess(1 - natural, judged))
        self.lam1 = self.limited(self.lam1 + 2 * self.rate * boundary)
        self.remargin(boundary)
        return replace(
            ClassControls.uniform(len(trained)),
            weight_nat=weights(self.lam0, trained),
            weight_adv=weights(self.lam1, trained),
            eps_scale=torch.exp(2 * self.lam2).float(),
        )

    def excess(self, error: Tensor, judged: Tensor) -> Tensor:
        """(K,) by how much an error is above the mean and the slack; 0 for a class that is not judged."""
        return torch.where(judged, error - error[judged].mean() - self.delta, 0.0)

    def limited(self, lam: Tensor) -> Tensor:
        lam = lam.clamp_min(0)
        return lam * (self.limit / lam.sum().clamp_min(self.limit))

    def remargin(self, boundary: Tensor) -> None:
        """Nothing here: every class keeps the same radius."""

    def state_dict(self) -> dict[str, Any]:
        return {"lam0": self.lam0, "lam1": self.lam1, "lam2": self.lam2}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lam0, self.lam1, self.lam2 = state["lam0"], state["lam1"], state["lam2"]


@dataclass(kw_only=True)
class FRLRemargin(FRLReweight):
    """FRL's weights, and a larger radius for classes with many examples near the boundary."""

    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv", "eps_scale")

    delta: Number = 0.07
    rate_eps: Number = 0.1
    """Rate of the radius."""
    max_scale: Number = 2.5
    """The largest radius, relative to eps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_eps <= 0:
            raise InputError(f"rate_eps must be positive, got {self.rate_eps}")
        if self.max_scale < 1:
            raise InputError(f"max_scale must be at least 1, got {self.max_scale}")

    def remargin(self, boundary: Tensor) -> None:
        low, high = math.log(MIN_SCALE) / 2, math.log(self.max_scale) / 2
        self.lam2 = (self.lam2 + self.rate_eps * boundary).clamp(low, high)


def weights(lam: Tensor, trained: Tensor) -> Tensor:
    """(K,) K · w_k over the classes in training; one for the others."""
    lam = torch.where(trained, lam, 0.0)
    # K · (1/K + (1 − 1/K) lam_k − 1/K Σ_{j≠k} lam_j)
    raised = (1 + trained.sum() * lam - lam.sum()).clamp_min(0)
    return torch.where(trained, raised / raised[trained].mean(), 1.0).float()
