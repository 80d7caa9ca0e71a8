"""``classwise analyze``: a question asked of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json, table
from classwise.core.errors import InputError


@guarded
def analyze(
    kind: Annotated[str, typer.Argument(help="Which question (see classwise list analyses).")],
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="Directory for KIND.json, KIND.parquet and KIND.html.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="A setting of the question as key=value.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The weights file of a model that was evaluated with --weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Ask why classes differ: confusion, training history, weights, features, and more."""
    from classwise.analysis import ANALYSES, Run
    from classwise.analysis import analyze as run_analysis
    from classwise.config.recipes import parse_overrides

    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: --out names a directory")
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
        say(part.about)
    if files:
        say(f"\npage: {files[-1]}")
