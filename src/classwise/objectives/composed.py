"""Objectives that add something to another one: they hold it, attack as it does and change its terms."""

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
    """Another objective, its settings among one's own."""

    bases: ClassVar[tuple[str, ...]] = tuple(BASES)
    """Those it may be built on."""

    base: str = "madry"
    beta: Number | None = None
    """The base's own, where it has one."""
    smoothing: Number = 0.0
    attack: PGD | None = None
    """The base's own if not given."""

    def __post_init__(self) -> None:
        if self.base not in self.bases:
            raise unknown("base of an objective", self.base, self.bases)
        beta = getattr(self.inner, "beta", 1.0)
        if self.beta not in (None, beta):
            raise InputError(f"base {self.base!r} has no beta, got {self.beta}")
        # Whoever asks for the attack or the strength of an objective gets those of the base.
        object.__setattr__(self, "beta", beta)
        object.__setattr__(self, "attack", self.inner.attack)

    @cached_property
    def inner(self) -> Smoothed:
        """The objective it is built on."""
        kind = BASES[self.base]
        given: dict[str, Any] = {"beta": self.beta, "smoothing": self.smoothing, "attack": self.attack}
        known = {part.name for part in fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known and value is not None})
