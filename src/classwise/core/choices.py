"""Choices that options, recipes and code share by name."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["auto", "eager", "compiled"]
"""``eager``: the model as it is, the reference. ``auto``: a twin where one can be had. ``compiled``: the same, with a
warning where none can."""
Rule = Literal["robust+worst", "robust", "worst", "worst-loss", "natural", "last"]
"""robust+worst: average plus worst-class robust accuracy; robust, worst: either alone; worst-loss: the smallest
loss of the worst class (Li & Liu 2023); natural: average natural accuracy; last: whatever the epochs before were."""
