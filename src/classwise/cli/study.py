"""``classwise study``: several runs and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json
from classwise.core.errors import InputError


@guarded
def study(
    name: Annotated[str, typer.Argument(help="A study's name (see classwise list studies) or a TOML file.")],
    out: Annotated[Path, typer.Option(help="Directory for runs, answers and the page.")],
    engine: Annotated[str, typer.Option(help="Where runs are done: local.")] = "local",
    workers: Annotated[int, typer.Option(help="Runs done at a time, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted study.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Train, evaluate and analyse everything a study names, and put the answers on one page."""
    from classwise.studies import load_study
    from classwise.studies.conduct import conduct

    if engine != "local":
        raise InputError(f"engine {engine!r} is not available yet: expected local")
    found = conduct(
        load_study(name), out, name=Path(name).stem, resume=resume, workers=workers, progress=ConsoleProgress()
    )
    if as_json:
        say_json({key: answer.to_dict() for key, answer in found.results.items()})
        return
    for key, answer in found.results.items():
        say(key)
        for sentence in answer.sentences():
            say(f"  {sentence}")
    say(f"\npage: {found.page}")
