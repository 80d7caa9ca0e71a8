"""Inputs and results of repair methods."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from classwise.core.choices import EngineName, RepairRule
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.data import ordered
from classwise.repairs.fit import Fit
from classwise.repairs.images import FittingImages
from classwise.storage.margins import Margins

Images = Literal["validation", "training", "none"]
"""``validation``: those of ``Case.index``; ``training``: those of ``Case.train``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(FittingImages):
    """Inputs of a repair method. They never include test images."""

    model: nn.Module
    """The original. A method changes a copy."""
    threat: Threat
    rule: RepairRule = "rho"
    floor: float | None = None
    """Minimum accuracy of the worst class, as a fraction; replaces the rule."""
    seed: int = 0
    batch_size: int | None = None
    engine: EngineName = "auto"
    targets: int | None = None
    margins_file: Path | None = None
    """File of the margin matrix."""
    known_margins: Path | None = None
    """Existing margin file to reuse if it matches."""
    progress: Progress = SILENT

    @property
    def example(self) -> Tensor:
        """(1, C, H, W) the first image, where only the shape of the input matters."""
        return next(ordered(self.images, [0], 1))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """Result of a repair method."""

    model: nn.Module
    layer: str | None = None
    """The layer whose biases were changed, for a method that changes only these."""
    fit: Fit | None = None
    margins: Margins | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Method(Protocol):
    """A repair method. Implementations are frozen dataclasses with keyword settings."""

    about: ClassVar[str]
    """One line for lists and help. Required."""
    uses: ClassVar[Images]
    """Which images of the case it uses. Required."""

    def __call__(self, case: Case) -> Repaired:
        """A repaired copy of the model."""


def settings_text(method: Any) -> dict[str, Any]:
    """Return the settings of a method for records."""
    return {one.name: getattr(method, one.name) for one in fields(method)}
