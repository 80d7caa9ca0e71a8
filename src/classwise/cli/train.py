"""``classwise train``: one training run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from classwise.cli.console import ConsoleProgress, guarded, number, say, say_json
from classwise.cli.launch import in_processes, leading
from classwise.reporting.formatting import plain

if TYPE_CHECKING:
    from classwise.api.train import Run


@guarded
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see classwise list recipes) or a TOML file.")],
    out: Annotated[Path, typer.Option(help="Run directory.")],
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value; may be repeated, as -o seed=1.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Several, as 0,1,2: side by side, into OUT/seed-0 and so on.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU where there is one]")] = None,
    processes: Annotated[
        int, typer.Option(help="Divide every batch among so many processes, each with a GPU where there are some.")
    ] = 1,
    workers: Annotated[int, typer.Option(help="With --seeds: runs at a time, each in a process of its own.")] = 1,
    log: Annotated[list[str] | None, typer.Option(help="Also log to tensorboard or mlflow; may be repeated.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Train a model by a recipe. Statistics and the best epoch come from a validation split, never from test data."""
    import classwise
    from classwise.config.recipes import load_recipe, parse_overrides
    from classwise.core.errors import InputError

    changes = parse_overrides(override or [])
    places = {out: changes}
    if seeds is not None:
        places = {out / f"seed-{seed}": {**changes, "seed": seed} for seed in _numbers(seeds)}
    recipes: dict[str | Path, Any] = {place: load_recipe(recipe, change) for place, change in places.items()}
    if processes != 1 and workers != 1:
        raise InputError("--workers have whole runs, --processes share the batches of one: choose either")
    if processes != 1:
        in_processes(processes)
    runs = classwise.train_together(
        recipes,
        device=device,
        resume=resume,
        workers=workers,
        loggers=list(dict.fromkeys(log or [])),
        progress=ConsoleProgress(),
    )
    if not leading():
        return
    if as_json:
        answers = [_answer(run) for run in runs]
        say_json(answers[0] if seeds is None else answers)
        return
    for run in runs:
        _show(run)


def _numbers(text: str) -> list[int]:
    from classwise.core.errors import InputError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds are whole numbers like 0,1,2, not {text!r}") from None


def _answer(run: Run) -> dict[str, Any]:
    best = run.outcome.history[run.outcome.best_epoch - 1]["validation"]
    answer = {"directory": str(run.directory), "epochs": run.outcome.epochs, "best_epoch": run.outcome.best_epoch}
    return {**answer, "rule": run.recipe.select, "ended": run.outcome.ended, "validation": best}


def _show(run: Run) -> None:
    out, best = run.directory, _answer(run)["validation"]
    if run.outcome.ended is not None:
        say(f"ended after {run.outcome.epochs} of {run.recipe.epochs} epochs: {run.outcome.ended}")
    if best["robust"] is None:
        say(f"epoch {run.outcome.epochs}, the last: nothing was set aside for validation")
    else:
        worst = best["robust"]["worst"]
        say(
            f"best epoch {run.outcome.best_epoch} of {run.outcome.epochs} by {run.recipe.select} on validation: "
            f"natural {number(best['natural']['overall'])}, under attack {number(best['robust']['overall'])}, worst "
            f"class {plain(run.classes[worst['label']])} at {number(worst['value'])}"
        )
    if run.repaired is not None:
        from classwise.reporting.repair import load_repair

        for sentence in load_repair(run.repaired).sentences():
            say(sentence)
        out = run.repaired
    following = ["classwise", "evaluate", "--model", str(out), "--data", run.recipe.data_at_the_end]
    following += ["--eps", run.recipe.eps]
    following += [] if run.recipe.norm == "Linf" else ["--norm", run.recipe.norm]
    say(f"next: {shlex.join([*following, '--out', str(out)])}")
