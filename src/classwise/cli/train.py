"""``classwise train``: one recipe, with one or several random seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from classwise.cli.console import ConsoleProgress, number, say, say_command, say_json
from classwise.cli.parameters import Json, accepts
from classwise.cli.processes import is_main_process, run_in_processes
from classwise.config.options import TrainOptions
from classwise.core.errors import InputError

if TYPE_CHECKING:
    from classwise.api.train import Run


@accepts(TrainOptions)
def train(options: dict[str, Any], as_json: Json = False) -> None:
    """Train a model from a recipe. Test data is never used: the best epoch is selected on validation images.

    Examples:
      classwise train digits/wat --out runs/wat
      classwise train digits/wat -o policy.eta=0.05 -o seed=1 --out runs/wat-slow
      classwise train digits/wat --seeds 0,1,2 --workers 2 --out runs/wat-seeds
    """
    import classwise
    from classwise.config.recipes import load_recipe, parse_overrides

    given = TrainOptions(**options)
    out, overrides = Path(given.out), parse_overrides(given.overrides)
    runs = {out: overrides}
    if given.seeds is not None:
        runs = {out / f"seed-{seed}": {**overrides, "seed": seed} for seed in _numbers(given.seeds)}
    elif given.workers != 1:
        raise InputError("--workers applies only to --seeds: pass --seeds, or omit --workers")
    recipes: dict[str | Path, Any] = {out: load_recipe(given.recipe, changes) for out, changes in runs.items()}
    if given.processes != 1:
        run_in_processes(given.processes)
    trained = classwise.train_together(
        recipes,
        device=given.device,
        resume=given.resume,
        workers=given.workers,
        loggers=list(dict.fromkeys(given.loggers)),
        progress=ConsoleProgress(),
    )
    if not is_main_process():
        return
    if as_json:
        outcomes = [_outcome(run) for run in trained]
        say_json(outcomes[0] if given.seeds is None else outcomes)
        return
    for run in trained:
        if len(trained) > 1:
            say(f"{run.directory}:")
        _show(run)


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds must be whole numbers joined by commas, e.g. 0,1,2; got {text!r}") from None
    if repeated := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise InputError(f"seed {repeated[0]} is given twice in --seeds {text}: pass each seed once")
    return seeds


def _outcome(run: Run) -> dict[str, Any]:
    best = run.outcome.history[run.outcome.best_epoch - 1]["validation"]
    return {
        "directory": str(run.directory),
        "epochs": run.outcome.epochs,
        "best_epoch": run.outcome.best_epoch,
        "rule": run.recipe.select,
        "ended": run.outcome.ended,
        "validation": best,
    }


def _show(run: Run) -> None:
    from classwise.reporting.formatting import plain

    out, recipe, outcome, best = run.directory, run.recipe, run.outcome, _outcome(run)["validation"]
    if outcome.ended is not None:
        say(f"stopped after {outcome.epochs} of {recipe.epochs} epochs: {outcome.ended}")
    if best["robust"] is None:
        say(f"kept epoch {outcome.epochs}, the last: the recipe holds out no validation images")
    else:
        worst = best["robust"]["worst"]
        say(
            f"best epoch {outcome.best_epoch} of {outcome.epochs} by {recipe.select} on validation: natural accuracy "
            f"{number(best['natural']['overall'])}%, robust accuracy {number(best['robust']['overall'])}%, worst class "
            f"{plain(run.classes[worst['label']])} at {number(worst['value'])}%"
        )
    if run.repaired is not None:
        from classwise.reporting.repair import load_repair

        for sentence in load_repair(run.repaired).sentences():
            say(sentence)
        out = run.repaired
    norm = [] if recipe.norm == "Linf" else ["--norm", recipe.norm]
    data = ["--data", recipe.data_at_the_end, "--eps", recipe.eps]
    say_command("classwise", "evaluate", "--model", out, *data, *norm, "--out", out)
