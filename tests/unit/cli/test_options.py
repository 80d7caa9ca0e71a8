"""Command line, Python functions and options classes agree in names, defaults and descriptions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer

import classwise as cw
from classwise.cli import app
from classwise.cli.registry_source import entries, nested_names
from classwise.config.options import EvaluateOptions, Options, RepairOptions, TrainOptions, options_of
from classwise.core.errors import InputError

COMMANDS: dict[str, tuple[type[Options], list[Any]]] = {
    "evaluate": (EvaluateOptions, [cw.evaluate]),
    "train": (TrainOptions, [cw.train, cw.train_together]),
    "repair": (RepairOptions, [cw.repair]),
}
COMMAND_ONLY = {"figures", "as_json", "help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_python_keywords_agree_with_the_options(name: str) -> None:
    kind, functions = COMMANDS[name]
    keywords: dict[str, inspect.Parameter] = {}
    for function in functions:
        keywords |= inspect.signature(function).parameters
    known = {one.name: one for one in options_of(kind) if one.about.only != "command"}
    assert set(keywords) - {"progress", "recipes"} == set(known)
    for option in known.values():
        if keywords[option.name].kind is not inspect.Parameter.VAR_KEYWORD:
            assert option.required == (keywords[option.name].default is inspect.Parameter.empty), option.name
            assert option.required or keywords[option.name].default == option.default, option.name
    for function in functions:
        described = set(known) & set(inspect.signature(function).parameters)
        assert all(f"\n    {word}: " in (function.__doc__ or "") for word in described)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_line_agrees_with_the_options(name: str) -> None:
    kind, _ = COMMANDS[name]
    command: Any = typer.main.get_command(app)
    params = {param.name: param for param in command.commands[name].params}
    known = {one.name: one for one in options_of(kind) if one.about.only != "python"}
    assert set(params) - COMMAND_ONLY == set(known)
    for option in known.values():
        param = params[option.name]
        assert param.required == (option.required or option.about.required), option.name
        if not param.required:
            assert param.default == (list(option.default) if option.several else option.default), option.name
        if option.flags:
            assert list(option.flags) == param.opts
        assert param.help.startswith(option.about.text)


@pytest.mark.parametrize("settings", [{"per_class": 0}, {"batch_size": "many"}, {"engine": "warp"}, {"margins": True}])
def test_wrong_values_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        EvaluateOptions(model="m", data="d", **settings)


def test_attacks_read_from_source_are_those_registered() -> None:
    from classwise.attacks import ATTACKS
    from classwise.cli.listing import first_line, join_settings, settings_text
    from classwise.corruptions import CORRUPTIONS

    for entry, (name, attack) in zip(entries("attacks", "ATTACKS"), ATTACKS.items(), strict=True):
        shown = (entry.name, join_settings(entry.settings), entry.summary)
        assert shown == (name, settings_text(attack), first_line(attack))
    assert [kind for kinds in nested_names("corruptions", "FAMILIES").values() for kind in kinds] == list(CORRUPTIONS)
