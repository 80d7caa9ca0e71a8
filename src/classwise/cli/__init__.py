"""The commands, one per module. The only package that prints. Imports everything."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import classwise
from classwise.cli import (
    analyze,
    bench,
    check,
    compare,
    data,
    demo,
    evaluate,
    export,
    listing,
    repair,
    site,
    study,
    table,
    train,
)
from classwise.cli.console import guarded, note, print_error, say
from classwise.cli.parameters import Command, Group
from classwise.cli.processes import exit_process

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Measure": {"evaluate": evaluate.evaluate, "compare": compare.compare, "check": check.check},
    "Improve": {"train": train.train, "repair": repair.repair},
    "Explain": {"analyze": analyze.analyze, "study": study.study},
    "Publish": {"table": table.table, "site": site.site, "export": export.export},
    "Start": {"demo": demo.demo, "list": listing.list_names},
}

app = typer.Typer(
    name="classwise",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for heading, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=heading)(guarded(command))
app.add_typer(data.data, name="data", rich_help_panel="Start")
app.command("bench", hidden=True, add_help_option=False, context_settings=bench.ANY_ARGUMENTS)(bench.bench)


def _show_version(value: bool) -> None:
    if value:
        say(f"classwise {classwise.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure, explain and improve the adversarial robustness of every class of an image classifier.

    Exit codes: 0 done; 1 a check failed or training diverged; 2 invalid input; 130 interrupted.

    Examples:
      classwise demo
      classwise train digits/wat --out runs/wat
      classwise evaluate --model runs/wat --data digits --eps 0.2 --attack fast --out runs/wat
      classwise check runs/wat --min-worst 20
    """


class _NoteHandler(logging.Handler):
    """Prints the log messages of the package as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def main() -> None:
    """Run the command line; the console script."""
    logging.getLogger("classwise").addHandler(_NoteHandler(logging.INFO))
    logging.getLogger("classwise").setLevel(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode still shows the result
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _print_usage_error(error)
        code = 2
    exit_process(code)


def _print_usage_error(error: Any) -> None:
    """Print what is wrong with the command line; without arguments, the help."""
    message = str(error.format_message()).strip()
    if message.startswith("Usage:"):
        say(message)
        return
    cause, param = error.__cause__, getattr(error, "param", None)
    if param is not None and hasattr(cause, "errors"):  # a pydantic error, which contains the value
        first = cause.errors()[0]
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(", unable")[0]
        name = " / ".join(param.opts)
        message = f"{name}: {problem}" if "is not one of" in problem else f"{name} = {first['input']!r}: {problem}"
    elif hasattr(error, "possibilities"):
        near = " or ".join(map(repr, sorted(error.possibilities or ())))
        message = f"unknown option {error.option_name!r}{f': did you mean {near}?' if near else ''}"
    message = message.replace("No such command", "unknown command").replace(". Did you mean", ": did you mean")
    help_command = f"{error.ctx.command_path} --help" if getattr(error, "ctx", None) else "classwise --help"
    see = " See" if message.endswith("?") else "; see"
    print_error(f"error: {message[0].lower()}{message[1:].rstrip('.')}{see} {help_command}")
