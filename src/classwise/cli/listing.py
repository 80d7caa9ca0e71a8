"""``classwise list``: names, settings and descriptions of everything that commands accept by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from classwise.cli.console import say_json, table
from classwise.cli.parameters import Json
from classwise.cli.registry_source import entries, nested_names


class Kind(StrEnum):
    """Kinds of names to list."""

    ATTACKS = "attacks"
    METHODS = "methods"
    MODELS = "models"
    DATASETS = "datasets"
    RECIPES = "recipes"
    ANALYSES = "analyses"
    STUDIES = "studies"
    REPAIRS = "repairs"


@dataclass(frozen=True)
class Listing:
    """A table of names with their descriptions."""

    title: str
    rows: list[list[str]]
    columns: list[str] = field(default_factory=lambda: ["name", "settings", "description"])
    named: bool = True
    """Whether the first column holds the names listed; the JSON output contains those only."""


def list_names(
    kind: Annotated[Kind, typer.Argument(help=f"What to list: {', '.join(Kind)}.", metavar="KIND")],
    as_json: Json = False,
) -> None:
    """List attacks, methods, models, data sets, recipes, analyses, studies or repairs with their settings.

    Examples:
      classwise list attacks
      classwise list recipes --json
    """
    tables = _TABLES[kind]()
    if as_json:
        say_json([row[0] for part in tables if part.named for row in part.rows])
        return
    for part in tables:
        table(part.title, part.columns, part.rows, numbers=False)


def _attacks() -> list[Listing]:
    families = nested_names("corruptions", "FAMILIES")
    kinds = [kind for family in families.values() for kind in family]
    corruptions = [
        "corruptions",
        f"kind={'+'.join(kinds)} family={'+'.join(families)} severity=1+2+3+4+5",
        "Natural corruptions of Hendrycks & Dietterich, without an attack.",
    ]
    attacks = [[one.name, join_settings(one.settings), one.summary] for one in entries("attacks", "ATTACKS")]
    return [Listing("attacks", [*attacks, corruptions])]


def _methods() -> list[Listing]:
    from classwise.objectives import OBJECTIVES
    from classwise.policies import POLICIES
    from classwise.training.compatibility import conflict, passes_per_image

    objectives = [
        [name, kind.paper, f"{passes_per_image(kind()):g}", settings_text(kind), first_line(kind)]
        for name, kind in OBJECTIVES.items()
    ]
    policies = [
        [name, kind.paper, ", ".join(kind.turns), ", ".join(kind.uses), settings_text(kind), first_line(kind)]
        for name, kind in POLICIES.items()
    ]
    matrix = [
        [name, *("–" if conflict(policy, objective()) else "yes" for objective in OBJECTIVES.values())]
        for name, policy in POLICIES.items()
    ]
    return [
        Listing(
            "objectives (cost per image and epoch in forward passes; a backward pass counts as two)",
            objectives,
            ["name", "paper", "cost", "settings", "description"],
        ),
        Listing("policies", policies, ["name", "paper", "controls", "statistics", "settings", "description"]),
        Listing("policies (rows) that work with objectives (columns)", matrix, ["", *OBJECTIVES], named=False),
    ]


def _models() -> list[Listing]:
    from classwise.models import MODELS

    return [Listing("models", [[name, settings_text(kind), first_line(kind)] for name, kind in MODELS.items()])]


def _datasets() -> list[Listing]:
    from classwise.data import DATASETS
    from classwise.data.datasets import DatasetCard
    from classwise.data.derived import DatasetSettings

    def about(card: DatasetCard) -> str:
        groups = f" in {len(card.superclasses)} superclasses" if card.superclasses else ""
        size = "x".join(str(side) for side in card.shape)
        return f"{len(card.classes)} classes{groups}, images of {size}, from {card.hub or 'scikit-learn'}"

    def settings(card: DatasetCard) -> str:
        return settings_text(DatasetSettings, without=("resize", "crop") if card.resize is None else ())

    return [Listing("datasets", [[name, settings(card), about(card)] for name, card in DATASETS.items()])]


def _recipes() -> list[Listing]:
    from classwise.config.recipes import recipe_header, recipe_names

    return [Listing("recipes", [[name, recipe_header(name)] for name in recipe_names()], ["name", "description"])]


def _analyses() -> list[Listing]:
    from classwise.analysis import ANALYSES

    rows = [[name, one.runs, settings_text(one.run), one.about] for name, one in ANALYSES.items()]
    return [Listing("analyses", rows, ["name", "runs", "settings", "description"])]


def _studies() -> list[Listing]:
    from classwise.studies import load_study, study_names

    studies = {name: load_study(name) for name in study_names()}
    rows = [[name, ", ".join(study.runs), study.about] for name, study in studies.items()]
    return [Listing("studies", rows, ["name", "runs", "description"])]


def _repairs() -> list[Listing]:
    from classwise.repairs.methods import METHODS

    rows = [[name, settings_text(kind), kind.about] for name, kind in METHODS.items()]
    return [Listing("repairs", rows)]


_TABLES: Mapping[Kind, Callable[[], list[Listing]]] = {
    Kind.ATTACKS: _attacks,
    Kind.METHODS: _methods,
    Kind.MODELS: _models,
    Kind.DATASETS: _datasets,
    Kind.RECIPES: _recipes,
    Kind.ANALYSES: _analyses,
    Kind.STUDIES: _studies,
    Kind.REPAIRS: _repairs,
}


def settings_text(factory: Callable[..., Any], without: Sequence[str] = ()) -> str:
    parameters = inspect.signature(factory).parameters.values()
    omitted = {"progress", *without}
    return join_settings(
        {
            one.name: one.default
            for one in parameters
            if one.default is not inspect.Parameter.empty and one.name not in omitted
        }
    )


def join_settings(defaults: Mapping[str, Any]) -> str:
    """Format settings and their defaults as in a spec."""
    return " ".join(_setting(name, default) for name, default in defaults.items())


def _setting(name: str, default: Any) -> str:
    """Format a setting and its default as in a spec; the name alone for no default."""
    if default is None or default == ():
        return name
    if is_dataclass(default) and not isinstance(default, type):
        plain: Any = type(default)()
        own = [part.name for part in fields(default) if getattr(default, part.name) != getattr(plain, part.name)]
        return f"{name}=({', '.join(f'{part}={getattr(default, part)}' for part in own)})"
    value = "+".join(f"{part:g}" for part in default) if isinstance(default, tuple) else default
    return f"{name}={value}"


def first_line(factory: Callable[..., Any]) -> str:
    return (inspect.getdoc(factory) or "").split("\n")[0]
