"""Named choices that options, recipes and code share."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["auto", "eager", "compiled"]
"""``eager``: the model itself, the reference. ``auto``: an optimized copy if possible. ``compiled``: as ``auto``, with
a warning if it is not possible."""
Rule = Literal["robust+worst", "robust", "worst", "worst-loss", "natural", "last"]
"""robust+worst: average plus worst-class robust accuracy; robust, worst: one of the two; worst-loss: the smallest loss
of the worst class (Li & Liu 2023); natural: average natural accuracy; last: the last epoch."""
