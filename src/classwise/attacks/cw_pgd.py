"""What the WAT paper and much of the field call CW: PGD on the margin max over k ≠ y of z_k, minus z_y.

It borrows the loss of Carlini & Wagner (2017) and leaves their search for the smallest perturbation, which is
``cw-linf`` and ``cw-l2``. WAT evaluates with 30 steps of 0.003 at 8/255; the default step, 2.5 · eps / steps = 0.0026
there, is close to it and fits every radius.

Deviations
* The margin is not cut off at a confidence κ (50 in the code that goes round): an attack in a ball has no reason to
  stop climbing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from classwise.attacks.pgd import PGD


@dataclass(frozen=True, kw_only=True)
class CWPGD(PGD):
    """PGD on the margin of Carlini & Wagner, which the field calls CW."""

    steps: int = 30
    loss: Literal["margin"] = "margin"
