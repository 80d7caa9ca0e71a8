"""``classwise analyze``: why classes differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, check_output, say, say_json, table
from classwise.cli.parameters import Json, Weights, option, output


def analyze(
    kind: Annotated[
        str, typer.Argument(help="Name of the analysis (see classwise list analyses).", metavar="ANALYSIS")
    ],
    runs: Annotated[list[Path], typer.Argument(help="Run directories of evaluations or training runs.", metavar="RUN")],
    out: Annotated[
        Path | None, output("Directory for ANALYSIS.json, .parquet, .tex and .html. [default: print the result]")
    ] = None,
    override: Annotated[
        list[str] | None,
        option(
            "Set a setting of the analysis; classwise list analyses shows names and defaults. Repeatable.",
            "KEY=VALUE",
            "-o",
            "--override",
        ),
    ] = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Analyze why classes differ: confusion, training history, weights, features, and more.

    Examples:
      classwise analyze confusion runs/wat --out runs/wat-confusion
      classwise analyze universality runs/trades runs/madry runs/wat -o attack=pgd
    """
    from classwise.analysis import ANALYSES, Run
    from classwise.analysis import analyze as run_analysis
    from classwise.config.recipes import parse_overrides

    check_output(out, "--out", "directory")
    opened = [Run(Run.open(run).path, weights=weights) for run in runs]
    answer = run_analysis(kind, opened, parse_overrides(override or []), ConsoleProgress())
    files = []
    if out is not None:
        title = f"{kind}: {ANALYSES[kind].about}"
        files = answer.save(out, title=title, eyebrow=", ".join(run.name for run in opened))
    if as_json:
        say_json(answer.to_dict())
        return
    for sentence in answer.sentences():
        say(sentence)
    for part in answer.tables():
        say("")
        table(part.title, part.columns, part.rows)
        if note := " ".join(filter(None, (part.about, part.foot))):
            say(note)
    if files:
        say(f"\npage: {files[-1]}")
