"""What a repair method is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from classwise.data import ImageSet, ordered
from classwise.engine import EngineName
from classwise.metrics.counts import Ints
from classwise.progress import SILENT, Progress
from classwise.repairs.fit import Fit, Rule
from classwise.storage.margins import Margins
from classwise.threat import Threat


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to repair and what may be used for it. Test images are not among them."""

    model: nn.Module
    """The original. A method changes a copy."""
    images: ImageSet
    index: Ints
    """Images to choose by: held out of the model's training where that is known."""
    train: Ints
    """Images to train on: those of the model's own training where they are known, else ``index``."""
    threat: Threat
    rule: Rule = "rho"
    floor: float | None = None
    """As a share; replaces the rule."""
    seed: int = 0
    batch_size: int | None = None
    engine: EngineName = "auto"
    targets: int | None = None
    margins_file: Path | None = None
    """Where the margin matrix is kept."""
    known_margins: Path | None = None
    """Where one may be found that was computed before."""
    progress: Progress = SILENT

    @property
    def example(self) -> Tensor:
        """(1, C, H, W) the first image, where only the shape of the input matters."""
        return next(ordered(self.images, [0], 1))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What came of a method."""

    model: nn.Module
    layer: str | None = None
    """The layer whose biases were changed, for a method that changes nothing else."""
    wrapped: bool = False
    """Whether the model is the original inside a ``Biased``."""
    fit: Fit | None = None
    margins: Margins | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Method(Protocol):
    """A way to repair. Implementations are frozen dataclasses with keyword settings."""

    about: ClassVar[str]
    """One line for lists and help."""
    uses_images: ClassVar[bool]

    def __call__(self, case: Case) -> Repaired:
        """A repaired copy of the model."""


def settings_text(method: Any) -> dict[str, Any]:
    """The settings of a method, for records."""
    return {name: getattr(method, name) for name in getattr(type(method), "__dataclass_fields__", {})}
