"""``classwise site``: a leaderboard over many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json
from classwise.core.errors import InputError
from classwise.reporting.leaderboard import BASELINE, find_runs
from classwise.reporting.site import write_site


@guarded
def site(
    places: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="Folder for index.html, the reports and the JSON files.")],
    title: Annotated[str, typer.Option(help="Of the page.")] = "Robustness, class by class",
    baseline: Annotated[str, typer.Option(help="The method that rho is against.")] = BASELINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the leaderboard as JSON.")] = False,
) -> None:
    """Write a static leaderboard over many runs, seeds merged, with a page for each run."""
    if out.is_file():
        raise InputError(f"{out} is a file: --out names a folder")
    board = write_site(find_runs(places), out, title=title, baseline=baseline, progress=ConsoleProgress())
    if as_json:
        say_json(board.model_dump(mode="json", by_alias=True))
    else:
        say(f"{len(board.entries)} entries: {out / 'index.html'}")
