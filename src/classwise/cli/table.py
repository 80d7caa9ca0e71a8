"""``classwise table``: accuracies for a paper, a spreadsheet or a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import check_output, say
from classwise.cli.parameters import option
from classwise.core.errors import InputError, unknown


def table(
    runs: Annotated[
        list[Path],
        typer.Argument(help="One run directory with a report, or several; the first is the baseline.", metavar="RUN"),
    ],
    format: Annotated[str, option("markdown, latex, csv or parquet.", "NAME")] = "markdown",
    out: Annotated[Path | None, option("Write to this file. [default: standard output]", "FILE")] = None,
) -> None:
    """Write a report class by class, or several side by side, as Markdown, LaTeX, CSV or parquet.

    Examples:
      classwise table runs/trades runs/wat --format latex --out table.tex
    """
    from classwise.reporting import compare, load_report
    from classwise.reporting.text import FORMATS, render, save

    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if out is None and format == "parquet":
        raise InputError("parquet cannot be printed: pass a file as --out")
    check_output(out, "--out", "file")
    subject = load_report(runs[0]) if len(runs) == 1 else compare(*runs)
    if out is None:
        sys.stdout.write(render(subject, format))
    else:
        save(subject, format, out)
        say(f"table: {out}")
