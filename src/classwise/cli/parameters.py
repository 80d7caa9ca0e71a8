"""Command-line parameters from the options classes, and help with groups and examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from classwise.cli.registry_source import entries
from classwise.config.options import GROUPS, OUTPUT, Option, Options, options_of

EXAMPLES = "Examples:"
"""Heading in a command's docstring; the lines below are shown at the end of its help."""


def option(text: str, metavar: str | None = None, *flags: str, group: str | None = None) -> Any:
    """Describe an option that only one command has."""
    return typer.Option(*flags, help=text, metavar=metavar, rich_help_panel=group)


def output(text: str, metavar: str = "DIR", *flags: str) -> Any:
    """Describe an option that names where to write."""
    return option(text, metavar, *flags, group=OUTPUT)


def limit(text: str, metavar: str | None = "N", *flags: str) -> Any:
    """Describe an option of the group of checks."""
    return option(text, metavar, *flags, group="Checks")


Json = Annotated[bool, option("Print the result as JSON.", None, "--json", group=OUTPUT)]
Figures = Annotated[Path | None, output("Save the charts as SVG, PDF and PNG to this directory.")]
Weights = Annotated[Path | None, option("Weights file of a model that was evaluated with --weights.", "FILE")]


def accepts(kind: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a class to a command, which receives their values by name as its first argument."""
    derived = [one for one in options_of(kind) if one.about.only != "python"]

    def adapt(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [*map(_parameter, derived), *(parameter.replace(kind=keyword) for parameter in own)]

        def run(**given: Any) -> None:
            command({one.name: given.pop(one.name) for one in derived}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return adapt


def _parameter(one: Option) -> inspect.Parameter:
    about = one.about
    settings: dict[str, Any] = {
        "help": _help(one),
        "metavar": None if one.types == (bool,) else one.metavar,
        "show_default": False,
        "rich_help_panel": about.group,
        "hidden": about.hidden,
        "autocompletion": _completion(one),
    }
    flags = one.flags
    if one.types == (bool,) and one.default is True:
        flags = (f"{flags[0]}/--no-{flags[0][2:]}",)
    info = typer.Option(*flags, **settings) if flags else typer.Argument(**settings)
    default = list(one.default) if one.several else one.default
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if one.required or about.required else default,
        annotation=Annotated[_type(one), info],
    )


def _completion(one: Option) -> Callable[[str], list[str]] | None:
    """Return a function that completes the values of an option without torch; None if they are not listed."""

    def names() -> Sequence[str]:
        if one.name == "attacks":
            return [*(entry.name for entry in entries("attacks", "ATTACKS")), "corruptions"]
        if one.name == "recipe":
            from classwise.config.recipes import recipe_names

            return recipe_names()
        return one.choices

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete if one.choices or one.name in ("attacks", "recipe") else None


def _help(one: Option) -> str:
    notes = ["Repeatable."] if one.several else []
    if one.default_text:
        notes.append(f"[default: {one.default_text}]")
    return " ".join([one.about.text, *notes])


def _type(one: Option) -> Any:
    """The type that the command line converts to; Python accepts more."""
    if one.several:
        return list[str]
    for kind in (Path, bool, int):
        if kind in one.types:
            return kind
    return float if one.types == (float,) else str


class _Help:
    """Help as plain text: options under their headings, no descriptions cut off, examples last."""

    help: str | None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name the arguments without braces."""
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_parts(self.help)[0])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options and arguments under their headings."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if (row := param.get_help_record(ctx)) is not None:
                argument = param.param_type_name == "argument"
                heading = getattr(param, "rich_help_panel", None) or ("Arguments" if argument else "Options")
                heading = "Help" if param.name == "help" else heading
                groups.setdefault(heading, []).append((param.metavar, row[1]) if argument else row)
        _write(groups, ("Arguments", *GROUPS[:-1], "Checks", "Options", GROUPS[-1], "Help"), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are."""
        if examples := _parts(self.help)[1]:
            formatter.write(f"\n{EXAMPLES}\n")
            formatter.write("".join(f"  {line.strip()}\n" for line in examples.splitlines()))


class Command(_Help, TyperCommand):
    """A command with grouped help."""


class Group(_Help, TyperGroup):
    """A group of commands with grouped help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings, then the options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                row = (name, _parts(command.help)[0].split("\n\n")[0].replace("\n", " "))
                groups.setdefault(heading if isinstance(heading, str) else "Commands", []).append(row)
        _write(groups, tuple(groups), formatter)
        super().format_options(ctx, formatter)


def _parts(text: str | None) -> tuple[str, str]:
    """The description of a command and its examples."""
    description, _, examples = inspect.cleandoc(text or "").partition(EXAMPLES)
    return description.strip(), examples.strip()


def _write(groups: dict[str, list[tuple[str, str]]], order: tuple[str, ...], formatter: Any) -> None:
    for heading in sorted(groups, key=order.index):
        with formatter.section(heading):
            formatter.write_dl(groups[heading])
