"""What is asked of another library, and what there is to know of one."""

# B batch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from classwise.attacks.adapters.describe import is_from, settings_of
from classwise.core.errors import InputError

if TYPE_CHECKING:
    from classwise.attacks.adapters.foreign import ForeignAttack


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One batch, put to another library."""

    model: nn.Module
    x: Tensor
    y: Tensor
    eps_scale: Tensor | None
    targets: Tensor | None
    generator: torch.Generator | None
    seed: int | None
    parts: list[Any]
    """The library's objects that work on it; they may be set for the call, and are given back as they were."""

    def labels(self, name: str, *, targeted: bool) -> Tensor:
        """The labels to give to an attack that reads them as its targets, or not."""
        if self.eps_scale is not None:
            raise InputError(f"{name} has one radius for all examples, and cannot stretch it for some")
        if targeted and self.targets is None:
            raise InputError(f"{name} takes the labels it is given for its targets, and there are no targets")
        if not targeted and self.targets is not None:
            raise InputError(f"{name} cannot be told which classes to aim at")
        return self.targets if targeted and self.targets is not None else self.y

    def set(self, **settings: Any) -> None:
        """Set the library's objects for this call, each where it has such a setting."""
        for part in self.parts:
            vars(part).update({key: value for key, value in settings.items() if key in vars(part)})

    def seed_what_has_none(self) -> None:
        """An object made with seed=None takes the time of day for one, and could not be repeated."""
        if self.seed is not None and vars(self.parts[0]).get("seed", 0) is None:
            self.set(seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What there is to know of a library."""

    name: str
    package: str
    """Where its attacks live."""
    methods: tuple[str, ...]
    """An attack of this library has one of these."""
    ask: Callable[[ForeignAttack, Question], Any]
    stated: Callable[[Any], tuple[Any, Any]]
    """The radius and the norm that an object states."""
    settings: Callable[[Any], dict[str, Any]] = lambda attack: settings_of(attack)
    """Whatever else tells two objects of one class apart."""
    built_on: Callable[[Any], Any] | None = None
    """The model an object is bound to, where the library binds them."""
    prepares: Callable[[Any], bool] = lambda attack: False
    """Whether an object was told that images are not what the model takes."""
    entrance: Callable[[Any, nn.Module], nn.Module] = lambda attack, model: model
    """The module through which the library asks the model; one of its own returns a list, with the logits last."""

    def made(self, thing: Any) -> bool:
        """Whether this is one of its attacks."""
        return is_from(thing, self.package) and any(hasattr(thing, method) for method in self.methods)
