"""Names of choices that options, recipes and code share."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["auto", "eager", "compiled"]
"""``eager``: search on the model itself, the reference. ``auto``: search on an optimized copy if one can be made.
``compiled``: the same, with a warning if none can be made."""
Norm = Literal["Linf", "L2"]
"""Norm of the ball of allowed perturbations."""
Rule = Literal["robust+worst", "robust", "worst", "worst-loss", "natural", "last"]
"""Selection of the best epoch on validation images. robust+worst: average plus worst-class robust accuracy; robust,
worst: either alone; worst-loss: the smallest loss of the worst class (Li & Liu 2023); natural: average natural
accuracy; last: the last epoch."""
RepairRule = Literal["rho", "worst", "tenth"]
"""Selection of a point on the frontier of a repair. rho: relative gain of the worst class minus relative loss of the
average; among the points whose rho is not significantly below the largest (bootstrap, one-sided, 5%), the one with the
highest average. worst: highest worst class. tenth: highest mean of the weakest tenth of the classes."""
