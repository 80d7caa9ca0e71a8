"""PGD on the margin max_{k != y} z_k - z_y, which the WAT paper and many others call the CW attack.

It takes the loss of Carlini & Wagner (2017), not their search for the smallest perturbation, which is ``cw-linf`` and
``cw-l2``. WAT evaluates with 30 steps of 0.003 at 8/255, close to the default step size 2.5 * eps / steps = 0.0026.

Deviations
* The margin is not clipped at a confidence kappa (50 in common implementations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from classwise.attacks.pgd import PGD
from classwise.core.numbers import Count


@dataclass(frozen=True, kw_only=True)
class CWPGD(PGD):
    """PGD on the margin loss of Carlini & Wagner (2017), often called CW."""

    steps: Count = 30
    loss: Literal["margin"] = "margin"
