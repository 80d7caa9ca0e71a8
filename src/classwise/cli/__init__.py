"""The commands: one a file. The only place that prints."""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

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
    list_,
    repair,
    site,
    study,
    table,
    train,
)
from classwise.cli.console import complain, note, say
from classwise.cli.launch import leave

app = typer.Typer(
    name="classwise",
    help="Class-wise adversarial robustness: find the class an attacker would pick, and train so that it holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("evaluate")(evaluate.evaluate)
app.command("train")(train.train)
app.command("repair")(repair.repair)
app.command("study")(study.study)
app.command("compare")(compare.compare)
app.command("table")(table.table)
app.command("site")(site.site)
app.command("analyze")(analyze.analyze)
app.command("check")(check.check)
app.command("export")(export.export)
app.command("bench", hidden=True, add_help_option=False, context_settings=bench.ANY_ARGUMENTS)(bench.bench)
app.add_typer(data.data, name="data")
app.command("list")(list_.list_)


def _version(asked: bool) -> None:
    if asked:
        say(f"classwise {classwise.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


class _Notes(logging.Handler):
    """What the package has to say on the way, in lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def main() -> None:
    """The console script."""
    logging.getLogger("classwise").addHandler(_Notes(logging.INFO))
    logging.getLogger("classwise").setLevel(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an odd sign is better than no result
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        said = getattr(error, "format_message", None)  # what is wrong with the words of a command
        if said is None:
            raise
        told = str(said())
        if told.startswith("Usage:"):  # a command without any words
            say(told)
        else:
            complain(f"error: {told}")
        code = 2
    leave(code)
