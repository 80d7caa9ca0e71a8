"""HE, hypersphere embedding (Pang et al., NeurIPS 2020), and its growing scales (Tian et al. 2021, Eq. 3, 5, 6).

The logits of the head are s · cos θ_k. In the cross-entropy of another objective, and only there, the true class has to
win by a margin: its logit is s · (cos θ_y - m). The attack and every divergence know no margin.

The scale s, which is set before every epoch n = 0, 1, ..., follows a schedule:

* ``constant``: s, with the margin m.
* ``lis``, HE-LIS (Eq. 5): s_n = s_0 + (n / n_FI)(s_FI - s_0), from s_0 = 1 to s_FI = 75 at n_FI = 100. No margin.
* ``cmp``, HE-CMP (Eq. 6): the largest probability that any image can reach rises linearly from 0.2 to 1 at n_FI = 90.
  It is reached where one cosine is 1 and all others are -1 (Eq. 3), P = 1 / (1 + (K - 1) e^(-2s)). No margin.

Whoever trains with it should know that paper's finding: most of the gain under plain PGD is gone under Temperature-PGD.
That is so where logits are bare cosines, as published code returns them. Here they have their scale, and PGD sees it.

Deviations
* Gradients flow through both norms of the head; the authors' code overwrites the weights by their normalised copies.
* The attack sees s · cos θ; attacked at the bare cosine, as a model that returns it would be, it is weaker.
* Eq. 3 has the closed form s = log((K - 1) P / (1 - P)) / 2; the paper solves it by Powell's method.
* P = 1 needs an infinite s. It is capped at the largest float32 below one, where s = 9.4 for ten classes.
* Up to five classes P = 0.2 is not above chance and would ask for a scale of zero or less. The scale never falls below
  0.4, which is about what ten classes begin with.
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
    """Another objective on a model with the hypersphere head, with a margin or a growing scale.

    Batch-norm statistics are updated as by the other objective.
    """

    paper: ClassVar[str] = "Pang et al. 2020"
    bases: ClassVar[tuple[str, ...]] = ("madry", "trades")

    scale: Number | None = None
    """s, with ``lis`` the last one: 15 and 75. ``cmp`` finds its own."""
    margin: Number | None = None
    """m, in units of the cosine: 0.2, and none where the scale grows."""
    schedule: Schedule = "constant"
    epochs: int | None = None
    """Over how many the scale grows: 100 with ``lis``, 90 with ``cmp``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        grows = self.schedule != "constant"
        if self.scale is not None and (self.scale <= 0 or self.schedule == "cmp"):
            raise InputError(f"scale must be positive, and none with cmp; got {self.scale} with {self.schedule}")
        if self.margin is not None and (self.margin < 0 or (grows and self.margin)):
            raise InputError(f"margin must not be negative, and 0 where the scale grows; got {self.margin}")
        if self.epochs is not None and self.epochs < 1:
            raise InputError(f"epochs must be at least 1, got {self.epochs}")
        for name, usual in (("scale", SCALES), ("margin", MARGINS), ("epochs", EPOCHS)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual[self.schedule])

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        head, scale = _head(model)
        with torch.no_grad():
            scale.fill_(self.scale_at(epoch, head.out_features))

    def scale_at(self, epoch: int, num_classes: int) -> float:
        """The scale of an epoch, counted from 1."""
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
        # A margin means a constant scale, so what is recorded of a step may hold its value.
        assert self.scale is not None
        assert self.margin is not None
        less = logits.new_full((1, 1), -self.scale * self.margin).expand(len(y), 1)
        return self.inner.cross_entropy(logits.scatter_add(1, y[:, None], less), y)


def scale_for(probability: float, num_classes: int) -> float:
    """The scale with which no probability can exceed this one (Eq. 3), within what is possible."""
    reachable = min(probability, LARGEST_PROBABILITY)
    odds = (num_classes - 1) * reachable / (1 - reachable)
    return max(math.log(odds) / 2, LEAST_SCALE)


def _head(model: nn.Module) -> tuple[nn.Linear, Tensor]:
    """The layer on the hypersphere, ours or anybody's that keeps its scale in a buffer, and that scale."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and isinstance(scale := dict(layer.named_buffers()).get("scale"), Tensor):
            return layer, scale
    raise InputError("objective 'he' needs a model with its head: set head = \"hypersphere\" in the recipe's model")
