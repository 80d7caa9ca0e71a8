"""``classwise train``: one training run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, number, say, say_json


@guarded
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see classwise list recipes) or a TOML file.")],
    out: Annotated[Path, typer.Option(help="Run directory.")],
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value; may be repeated, as -o seed=1.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU where there is one]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Train a model by a recipe. Statistics and the best epoch come from a validation split, never from test data."""
    import classwise
    from classwise.recipes import load_recipe, parse_overrides

    run = classwise.train(
        load_recipe(recipe, parse_overrides(override or [])),
        out=out,
        device=device,
        resume=resume,
        progress=ConsoleProgress(),
    )
    best = run.outcome.history[run.outcome.best_epoch - 1]["validation"]
    if as_json:
        answer = {"directory": str(out), "epochs": run.outcome.epochs, "best_epoch": run.outcome.best_epoch}
        say_json({**answer, "rule": run.recipe.select, "validation": best})
        return
    robust = best["robust"]
    say(
        f"best epoch {run.outcome.best_epoch} of {run.outcome.epochs} by {run.recipe.select} on validation: natural "
        f"{number(best['natural']['overall'])}, under attack {number(robust['overall'])}, worst class "
        f"{robust['worst']['label']} at {number(robust['worst']['value'])}"
    )
    following = ["classwise", "evaluate", "--model", str(out), "--data", run.recipe.data, "--eps", run.recipe.eps]
    following += [] if run.recipe.norm == "Linf" else ["--norm", run.recipe.norm]
    say(f"next: {shlex.join([*following, '--out', str(out)])}")
