"""``classwise study``: several runs and analyses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, say, say_json
from classwise.cli.parameters import Json, option, output
from classwise.core.errors import InputError


def study(
    name: Annotated[str, typer.Argument(help="Study name (see classwise list studies) or TOML file.", metavar="STUDY")],
    out: Annotated[Path, output("Directory for the runs, the analyses and the page.")],
    engine: Annotated[str, typer.Option(hidden=True)] = "local",
    workers: Annotated[int, option("Runs at a time, each in its own process.", "N")] = 1,
    resume: Annotated[bool, option("Continue an interrupted study.", None, "--resume")] = False,
    as_json: Json = False,
) -> None:
    """Train, evaluate and analyze all runs of a study, and write one page.

    Examples:
      classwise study analyses-digits --out studies/digits
    """
    from classwise.studies import load_study
    from classwise.studies.conduct import conduct

    if engine != "local":
        raise InputError(f"engine {engine!r} is not available yet: pass local")
    done = conduct(
        load_study(name), out, name=Path(name).stem, resume=resume, workers=workers, progress=ConsoleProgress()
    )
    if as_json:
        say_json({key: answer.to_dict() for key, answer in done.results.items()})
        return
    for key, answer in done.results.items():
        say(key)
        for sentence in answer.sentences():
            say(f"  {sentence}")
    say(f"\npage: {done.page}")
