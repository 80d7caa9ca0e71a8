"""FRL, fair robust learning (Xu et al. 2021): bounds on class errors above the average, by Lagrange multipliers.

With the natural error clean_k = 1 - natural_k and the boundary error bndy_k = natural_k - robust_k of class k on
validation data, and their excess over the mean, g0_k = clean_k - mean clean - delta and g1_k likewise,

    lam0 <- max(0, lam0 + rate * g0),   lam1 <- max(0, lam1 + 2 * rate * g1),   each scaled to a sum of at most
    ``limit``, w_k = 1/K + (1 - 1/K) * lam_k - 1/K * sum_{j != k} lam_j,   lam0 for the natural, lam1 for the
    adversarial term.

Reweighting (RW) ends here. With re-margining (RM) the radius of a class grows with its boundary error:

    lam2 <- lam2 + rate_eps * g1,   eps_k = eps * exp(2 * lam2_k), within [0.98, max_scale] * eps.

Deviations
* The loss has the weights K * w_k, whose mean over the classes is one; the authors divide by the weights of each batch.
* w_k is negative only if ``limit`` is above one. It is then set to 0, and the weights are scaled back to mean one.
* The first epoch is uniform; the authors measure before every epoch, so their first epoch is already weighted.
* lam2 is clipped to the bounds of the radius. The authors' lam2 exceeds them and takes as many epochs to return.
* The rate is constant; the authors halve it every 40 epochs and train for 40.
* Means are over the classes present in training and validation; other classes keep their multipliers.
* The step size of the attack scales with the radius of the class; the authors' is the same for all in a batch.
* beta is that of the objective; the authors use 1.5.
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
"""Smallest radius, relative to eps."""


@dataclass(kw_only=True)
class FRLReweight(Policy):
    """FRL, reweighting: raise the loss weight of classes whose natural or boundary error exceeds the mean."""

    paper: ClassVar[str] = "Xu et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.natural", "val.robust")
    fine_tunes: ClassVar[bool] = True

    delta: Number = 0.1
    """Tolerated excess of a class error over the mean."""
    rate: Number = 0.05
    """Learning rate of the weight multipliers."""
    limit: Number = 0.5
    """Largest sum of the multipliers of one term."""
    lam0: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    lam1: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    lam2: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)
    """(K,) multipliers of the natural error and of the boundary error, and half the logarithm of the radius scale."""

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
        measured = trained & natural.isfinite() & robust.isfinite()
        boundary = self.excess(natural - robust, measured)
        self.lam0 = self.limited(self.lam0 + self.rate * self.excess(1 - natural, measured))
        self.lam1 = self.limited(self.lam1 + 2 * self.rate * boundary)
        self.remargin(boundary)
        return replace(
            ClassControls.uniform(len(trained)),
            weight_nat=weights(self.lam0, trained),
            weight_adv=weights(self.lam1, trained),
            eps_scale=torch.exp(2 * self.lam2).float(),
        )

    def excess(self, error: Tensor, measured: Tensor) -> Tensor:
        """Return the excess of each class error (K,) over the mean plus delta; 0 for classes without statistics."""
        return torch.where(measured, error - error[measured].mean() - self.delta, 0.0)

    def limited(self, lam: Tensor) -> Tensor:
        """Return multipliers made non-negative and scaled to a sum of at most ``limit``."""
        lam = lam.clamp_min(0)
        return lam * (self.limit / lam.sum().clamp_min(self.limit))

    def remargin(self, boundary: Tensor) -> None:
        """Update the radius of each class; reweighting leaves it as it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"lam0": self.lam0, "lam1": self.lam1, "lam2": self.lam2}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lam0, self.lam1, self.lam2 = state["lam0"], state["lam1"], state["lam2"]


@dataclass(kw_only=True)
class FRLRemargin(FRLReweight):
    """FRL, reweighting and re-margining: also a larger radius for classes with a high boundary error."""

    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv", "eps_scale")

    delta: Number = 0.07
    rate_eps: Number = 0.1
    """Learning rate of the radius."""
    max_scale: Number = 2.5
    """Largest radius, relative to eps."""

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
    """Return class weights (K,): K * w_k for classes in the training set, 1 for the others."""
    lam = torch.where(trained, lam, 0.0)
    # K * (1/K + (1 - 1/K) * lam_k - 1/K * sum_{j != k} lam_j)
    raised = (1 + trained.sum() * lam - lam.sum()).clamp_min(0)
    return torch.where(trained, raised / raised[trained].mean(), 1.0).float()
