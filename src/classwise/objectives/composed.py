"""The base of objectives that modify another one: they use its attack and change its loss terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from classwise.attacks import PGD
from classwise.config.spec import Number
from classwise.core.errors import InputError, unknown
from classwise.core.types import Objective
from classwise.objectives.label_smoothing import Smoothed
from classwise.objectives.madry import Madry
from classwise.objectives.standard import Standard
from classwise.objectives.trades import Trades

BASES: Mapping[str, type[Smoothed]] = {"standard": Standard, "madry": Madry, "trades": Trades}


@dataclass(frozen=True, kw_only=True)
class Composed(Objective):
    """An objective built on another one, whose settings are also its own."""

    bases: ClassVar[tuple[str, ...]] = tuple(BASES)
    """Objectives it may be built on."""

    base: str = "madry"
    """Objective it is built on."""
    beta: Number | None = None  # type: ignore[assignment]  # a number once the object is made
    """Strength of the adversarial term. Default: that of the base."""
    smoothing: Number = 0.0
    """Label smoothing of the base."""
    attack: PGD | None = None
    """Training attack. Default: that of the base."""

    def __post_init__(self) -> None:
        if self.base not in self.bases:
            raise unknown("base of an objective", self.base, self.bases)
        if self.beta not in (None, self.inner.beta):
            raise InputError(f"base {self.base!r} has no beta, got {self.beta}")
        object.__setattr__(self, "beta", self.inner.beta)
        object.__setattr__(self, "attack", self.inner.attack)

    @cached_property
    def inner(self) -> Smoothed:
        """The objective it is built on."""
        kind = BASES[self.base]
        given: dict[str, Any] = {"beta": self.beta, "smoothing": self.smoothing, "attack": self.attack}
        known = {part.name for part in fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known and value is not None})

    @property
    def used_controls(self) -> frozenset[str]:
        return self.inner.used_controls
