"""HE, hypersphere embedding (Pang et al., NeurIPS 2020), with the scale schedules of Tian et al. (2021, Eq. 3, 5, 6).

The logits of the head are s * cos(theta_k). In the cross-entropy of the base objective, and only there, the logit of
the true class is s * (cos(theta_y) - m), with margin m. The attack and the divergences use no margin.

The scale s is set before every epoch n = 0, 1, ... by a schedule:

* ``constant``: s, with margin m.
* ``lis``, HE-LIS (Eq. 5): s_n = s_0 + (n / n_FI) * (s_FI - s_0), from s_0 = 1 to s_FI = 75 at n_FI = 100. No margin.
* ``cmp``, HE-CMP (Eq. 6): the largest possible probability rises linearly from 0.2 to 1 at n_FI = 90. It is reached if
  one cosine is 1 and all others are -1 (Eq. 3): P = 1 / (1 + (K - 1) * exp(-2 * s)). No margin.

Tian et al. find that most of the gain under plain PGD disappears under Temperature-PGD. This holds for models that
return cosines without the scale, as published code does. Here the logits include the scale, so plain PGD uses it.

Deviations
* Gradients flow through both norms of the head; the authors' code overwrites the weights by normalized copies.
* The attack uses s * cos(theta); an attack on the cosines without the scale is weaker.
* Eq. 3 is solved in closed form, s = log((K - 1) * P / (1 - P)) / 2; the paper uses Powell's method.
* P = 1 needs an infinite s. P is capped at the largest float32 below one, where s = 9.4 for ten classes.
* With up to five classes P = 0.2 is not above chance, and s would be zero or less. The scale is at least 0.4, about the
  first value for ten classes.
"""

# B batch, K classes

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import LossTerms
from classwise.objectives.composed import Composed

FIRST_SCALE = 1.0
FIRST_PROBABILITY = 0.2
LARGEST_PROBABILITY = 1 - 2**-24
LEAST_SCALE = 0.4

Schedule = Literal["constant", "lis", "cmp"]
SCALES: dict[Schedule, float | None] = {"constant": 15.0, "lis": 75.0, "cmp": None}
MARGINS: dict[Schedule, float] = {"constant": 0.2, "lis": 0.0, "cmp": 0.0}
EPOCHS: dict[Schedule, int] = {"constant": 1, "lis": 100, "cmp": 90}


@dataclass(frozen=True, kw_only=True)
class HypersphereEmbedding(Composed):
    """Hypersphere embedding: a base objective on a cosine head, with an angular margin or a growing scale.

    Batch-norm statistics are updated as by the base objective.
    """

    paper: ClassVar[str] = "Pang et al. 2020"
    bases: ClassVar[tuple[str, ...]] = ("madry", "trades")

    scale: Number | None = None
    """Scale s; with ``lis`` the last one. Default: 15, with ``lis`` 75. ``cmp`` computes its own."""
    margin: Number | None = None
    """Margin m of the cosine. Default: 0.2 with ``constant``, else 0."""
    schedule: Schedule = "constant"
    """How the scale grows: constant, lis or cmp."""
    epochs: int | None = None
    """Number of epochs over which the scale grows. Default: 100 with ``lis``, 90 with ``cmp``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        grows = self.schedule != "constant"
        if self.scale is not None and (self.scale <= 0 or self.schedule == "cmp"):
            raise InputError(f"scale must be positive, and unset with cmp, got {self.scale} with {self.schedule}")
        if self.margin is not None and (self.margin < 0 or (grows and self.margin)):
            raise InputError(
                f"margin must not be negative, and 0 unless schedule=constant, got {self.margin} with {self.schedule}"
            )
        if self.epochs is not None and self.epochs < 1:
            raise InputError(f"epochs must be at least 1, got {self.epochs}")
        for name, defaults in (("scale", SCALES), ("margin", MARGINS), ("epochs", EPOCHS)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, defaults[self.schedule])

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        head, scale = _head(model)
        with torch.no_grad():
            scale.fill_(self.scale_at(epoch, head.out_features))

    def scale_at(self, epoch: int, num_classes: int) -> float:
        """Return the scale in an epoch, counted from 1."""
        assert self.epochs is not None
        share = min((epoch - 1) / self.epochs, 1.0)
        if self.schedule == "cmp":
            return scale_for(FIRST_PROBABILITY + share * (1 - FIRST_PROBABILITY), num_classes)
        assert self.scale is not None
        return self.scale if self.schedule == "constant" else FIRST_SCALE + share * (self.scale - FIRST_SCALE)

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        terms = self.inner.terms(model, x, x_adv, y)
        if not self.margin:
            return terms
        if terms.logits_nat is not None:
            return replace(terms, nat=self._cross_entropy(terms.logits_nat, y))
        assert terms.logits_adv is not None
        return replace(terms, adv=self._cross_entropy(terms.logits_adv, y))

    def _cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        # A margin implies a constant scale, so a recorded training step may contain its value.
        assert self.scale is not None
        assert self.margin is not None
        less = logits.new_full((1, 1), -self.scale * self.margin).expand(len(y), 1)
        return self.inner.cross_entropy(logits.scatter_add(1, y[:, None], less), y)


def scale_for(probability: float, num_classes: int) -> float:
    """Return the scale at which the largest possible probability has this value (Eq. 3), within limits."""
    reachable = min(probability, LARGEST_PROBABILITY)
    odds = (num_classes - 1) * reachable / (1 - reachable)
    return max(math.log(odds) / 2, LEAST_SCALE)


def _head(model: nn.Module) -> tuple[nn.Linear, Tensor]:
    """Return the head, a linear layer with a buffer ``scale``, and that scale."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and isinstance(scale := dict(layer.named_buffers()).get("scale"), Tensor):
            return layer, scale
    raise InputError("objective 'he' needs a hypersphere head: set head = \"hypersphere\" in the recipe's model")
