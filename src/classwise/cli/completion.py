"""Values that the shell completes. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from classwise.cli.registry_source import entries
from classwise.core.choices import EngineName, Norm, RepairRule


def starting_with(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function for names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _recipes() -> list[str]:
    from classwise.config.recipes import recipe_names

    return recipe_names()


def _attacks() -> list[str]:
    return [*(entry.name for entry in entries("attacks", "ATTACKS")), "corruptions"]


COMPLETIONS: dict[str, Callable[[str], list[str]]] = {
    "attacks": starting_with(_attacks),
    "engine": starting_with(lambda: get_args(EngineName)),
    "norm": starting_with(lambda: get_args(Norm)),
    "recipe": starting_with(_recipes),
    "rule": starting_with(lambda: get_args(RepairRule)),
}
"""Completion functions by option name."""
