"""Phases: epochs on images of one size, in batches of one size, one phase after the other.

Small images first is how Wong et al. (Fast is better than free, ICLR 2020) train on ImageNet, after DAWNBench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from classwise.data import ImageSet


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some epochs. The images of all phases are the same ones, in the same order, at sizes of their own."""

    epochs: int
    images: ImageSet
    batch_size: int
    crop: int
    """Pixels of zero padding before a random crop back to size."""
    part: float | None = None
    """Instead: images are random parts of at least this share of the area."""
    size: int | None = None
    """Pixels that parts are brought to, and the middle of an image has; None: those of the images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the model is shown."""
        channels, *sides = self.images.images.shape[1:]
        height, width = sides if self.size is None else (self.size, self.size)
        return channels, height, width


def phase_of(phases: Sequence[Phase], epoch: int) -> int:
    """Which phase an epoch lies in, both counted from 0; beyond the last epoch, the last phase."""
    return sum(epoch >= end for end in list(accumulate(phase.epochs for phase in phases))[:-1])
