"""``classwise table``: the numbers of runs for a paper, a spreadsheet or a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import guarded, say
from classwise.core.errors import InputError, unknown
from classwise.reporting import compare, load_report
from classwise.reporting.text import FORMATS, render, save


@guarded
def table(
    runs: Annotated[list[Path], typer.Argument(help="One run directory; or several, the first is the baseline.")],
    format: Annotated[str, typer.Option(help="markdown, latex, csv or parquet.")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="Write to this file. [default: print]")] = None,
) -> None:
    """Write a report class by class, or several side by side, as Markdown, LaTeX, CSV or parquet."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if out is None and format == "parquet":
        raise InputError("parquet cannot be printed: name its file with --out")
    if out is not None and out.is_dir():
        raise InputError(f"{out} is a directory: --out names the table's file")
    subject = load_report(runs[0]) if len(runs) == 1 else compare(*runs)
    if out is None:
        sys.stdout.write(render(subject, format))
    else:
        save(subject, format, out)
        say(f"table: {out}")
