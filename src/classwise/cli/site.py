"""``classwise site``: a leaderboard over many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, check_output, say, say_json
from classwise.cli.parameters import Json, option, output


def site(
    places: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that contain them.", metavar="DIR")
    ],
    out: Annotated[Path, output("Directory for index.html, the reports and the JSON files.")],
    title: Annotated[str, option("Title of the page.", "TEXT")] = "Robustness, class by class",
    baseline: Annotated[
        str,
        option(
            "Method that is the baseline of rho (relative gain of the worst class minus relative loss of the average).",
            "NAME",
        ),
    ] = "trades",
    as_json: Json = False,
) -> None:
    """Write a static leaderboard over many runs, averaged over random seeds, with a page for each run.

    Examples:
      classwise site runs --out site
    """
    from classwise.reporting.leaderboard import find_runs
    from classwise.reporting.site import write_site

    check_output(out, "--out", "directory")
    board = write_site(find_runs(places), out, title=title, baseline=baseline, progress=ConsoleProgress())
    if as_json:
        say_json(board.model_dump(mode="json", by_alias=True))
    else:
        say(f"{len(board.entries)} entries: {out / 'index.html'}")
