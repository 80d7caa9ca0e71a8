"""``classwise list``: what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from classwise.cli.console import guarded, say_json, table


class Kind(StrEnum):
    """What can be listed."""

    ATTACKS = "attacks"
    METHODS = "methods"
    MODELS = "models"
    DATASETS = "datasets"
    RECIPES = "recipes"


@guarded
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the names as JSON.")] = False,
) -> None:
    """List attacks, methods, models, data sets or recipes with their settings."""
    rows = _ROWS[kind]()
    if as_json:
        say_json([row[0] for row in rows])
        return
    table(kind.value, ["name", "settings", "what it is"], rows, numbers=False)


def _attacks() -> list[list[str]]:
    from classwise.attacks import ATTACKS
    from classwise.corruptions import CORRUPTIONS

    every = [
        "corruptions",
        f"kind={'+'.join(CORRUPTIONS)} family=noise+blur+weather+digital severity=1+2+3+4+5",
        "Natural corruptions of Hendrycks & Dietterich: no ball, no attacker.",
    ]
    return [*_registered(ATTACKS), every]


def _methods() -> list[list[str]]:
    from classwise.objectives import OBJECTIVES
    from classwise.policies import POLICIES

    objectives = [[f"objective = {row[0]}", *row[1:]] for row in _registered(OBJECTIVES)]
    return objectives + [[f"policy = {row[0]}", *row[1:]] for row in _registered(POLICIES)]


def _models() -> list[list[str]]:
    from classwise.models import MODELS

    return _registered(MODELS)


def _datasets() -> list[list[str]]:
    from classwise.data import DATASETS

    return [[name, "", f"{len(card.classes)} classes"] for name, card in DATASETS.items()]


def _recipes() -> list[list[str]]:
    from classwise.recipes import recipe_header, recipe_names

    return [[name, "", recipe_header(name)] for name in recipe_names()]


_ROWS: Mapping[Kind, Callable[[], list[list[str]]]] = {
    Kind.ATTACKS: _attacks,
    Kind.METHODS: _methods,
    Kind.MODELS: _models,
    Kind.DATASETS: _datasets,
    Kind.RECIPES: _recipes,
}


def _registered(registry: Mapping[str, Callable[..., Any]]) -> list[list[str]]:
    return [[name, _settings(factory), _first_sentence(factory)] for name, factory in registry.items()]


def _settings(factory: Callable[..., Any]) -> str:
    parameters = inspect.signature(factory).parameters.values()
    return " ".join(_setting(p.name, p.default) for p in parameters if p.default is not inspect.Parameter.empty)


def _setting(name: str, default: Any) -> str:
    """A default as it would be written in a spec; the bare name where there is none."""
    if default is None:
        return name
    value = "+".join(f"{part:g}" for part in default) if isinstance(default, tuple) else default
    return f"{name}={value}"


def _first_sentence(factory: Callable[..., Any]) -> str:
    return (inspect.getdoc(factory) or "").split("\n")[0]
