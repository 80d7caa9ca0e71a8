"""``classwise list``: what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
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
    ANALYSES = "analyses"
    STUDIES = "studies"
    REPAIRS = "repairs"


@dataclass(frozen=True)
class Listing:
    """A table of what there is."""

    title: str
    rows: list[list[str]]
    columns: list[str] = field(default_factory=lambda: ["name", "settings", "what it is"])
    named: bool = True
    """Whether its first column is what is listed, or says more of it."""


@guarded
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the names as JSON.")] = False,
) -> None:
    """List attacks, methods, models, data sets, recipes, analyses, studies or repairs with their settings."""
    tables = _TABLES[kind]()
    if as_json:
        say_json([row[0] for part in tables if part.named for row in part.rows])
        return
    for part in tables:
        table(part.title, part.columns, part.rows, numbers=False)


def _attacks() -> list[Listing]:
    from classwise.attacks import ATTACKS
    from classwise.corruptions import CORRUPTIONS

    every = [
        "corruptions",
        f"kind={'+'.join(CORRUPTIONS)} family=noise+blur+weather+digital severity=1+2+3+4+5",
        "Natural corruptions of Hendrycks & Dietterich: no ball, no attacker.",
    ]
    return [Listing("attacks", [*_registered(ATTACKS), every])]


def _methods() -> list[Listing]:
    from classwise.objectives import OBJECTIVES
    from classwise.policies import POLICIES
    from classwise.training.compatibility import conflict, nature_of

    plain = {name: kind() for name, kind in OBJECTIVES.items()}
    objectives = [
        [name, OBJECTIVES[name].paper, f"{nature_of(objective).cost:g}", *_registered({name: OBJECTIVES[name]})[0][1:]]
        for name, objective in plain.items()
    ]
    policies = [
        [name, kind.paper, ", ".join(kind.turns), ", ".join(kind.uses), *_registered({name: kind})[0][1:]]
        for name, kind in POLICIES.items()
    ]
    matrix = [
        [name, *("–" if conflict(kind, objective) else "yes" for objective in plain.values())]
        for name, kind in POLICIES.items()
    ]
    return [
        Listing("objective =", objectives, ["name", "paper", "passes an image", "settings", "what it is"]),
        Listing("policy =", policies, ["name", "paper", "turns", "looks at", "settings", "what it is"]),
        Listing("which policy makes sense on which objective", matrix, ["", *plain], named=False),
    ]


def _models() -> list[Listing]:
    from classwise.models import MODELS

    return [Listing("models", _registered(MODELS))]


def _datasets() -> list[Listing]:
    from classwise.data import DATASETS
    from classwise.data.cards import Choice, DatasetCard

    def about(card: DatasetCard) -> str:
        groups = f" in {len(card.superclasses)} superclasses" if card.superclasses else ""
        size = "x".join(str(side) for side in card.shape)
        return f"{len(card.classes)} classes{groups}, images of {size}, from {card.hub or 'scikit-learn'}"

    def settings(card: DatasetCard) -> str:
        return _settings(Choice, without=("resize", "crop") if card.resize is None else ())

    return [Listing("datasets", [[name, settings(card), about(card)] for name, card in DATASETS.items()])]


def _recipes() -> list[Listing]:
    from classwise.config.recipes import recipe_header, recipe_names

    return [Listing("recipes", [[name, "", recipe_header(name)] for name in recipe_names()])]


def _analyses() -> list[Listing]:
    from classwise.analysis import ANALYSES

    rows = [[name, one.runs, _settings(one.run), one.about] for name, one in ANALYSES.items()]
    return [Listing("analyses", rows, ["name", "runs", "settings", "what it asks"])]


def _studies() -> list[Listing]:
    from classwise.studies import load_study, study_names

    found = {name: load_study(name) for name in study_names()}
    rows = [[name, ", ".join(study.runs), study.about] for name, study in found.items()]
    return [Listing("studies", rows, ["name", "runs", "what it is"])]


def _repairs() -> list[Listing]:
    from classwise.repairs.methods import METHODS

    rows = [[name, _settings(kind), getattr(kind, "about", "")] for name, kind in METHODS.items()]
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


def _registered(registry: Mapping[str, Callable[..., Any]]) -> list[list[str]]:
    return [[name, _settings(factory), _first_sentence(factory)] for name, factory in registry.items()]


def _settings(factory: Callable[..., Any], without: Sequence[str] = ()) -> str:
    parameters = inspect.signature(factory).parameters.values()
    left_out = {"progress", *without}
    given = [p for p in parameters if p.default is not inspect.Parameter.empty and p.name not in left_out]
    return " ".join(_setting(p.name, p.default) for p in given)


def _setting(name: str, default: Any) -> str:
    """A default as it would be written in a spec; the bare name where there is none."""
    if default is None or default == ():
        return name
    if is_dataclass(default) and not isinstance(default, type):
        usual: Any = type(default)()
        own = [part.name for part in fields(default) if getattr(default, part.name) != getattr(usual, part.name)]
        return f"{name}=({', '.join(f'{part}={getattr(default, part)}' for part in own)})"
    value = "+".join(f"{part:g}" for part in default) if isinstance(default, tuple) else default
    return f"{name}={value}"


def _first_sentence(factory: Callable[..., Any]) -> str:
    return (inspect.getdoc(factory) or "").split("\n")[0]
