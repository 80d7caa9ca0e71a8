"""Trainings that an analysis needs: the recipe of a run with a change, each in a directory of its own.

Finished trainings are reused and interrupted ones are resumed, so an analysis that trains for hours can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from classwise.analysis.run import Run
from classwise.api.evaluate import evaluate
from classwise.api.train import train_together
from classwise.config.recipes import Recipe, load_recipe
from classwise.config.spec import first_line
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.storage.run_directory import RunDirectory
from classwise.training.workers import Send, check_workers, run_jobs


def recipe_of(run: Run) -> Recipe:
    """Return the training recipe of a run; raise ``InputError`` if it was not trained by classwise."""
    recipe = recipe_if_trained(run)
    if recipe is None:
        raise InputError(f"{run.path} is not the directory of a training; this analysis repeats the training")
    return recipe


def recipe_if_trained(run: Run) -> Recipe | None:
    """Return the training recipe of a run, or None."""
    recorded = RunDirectory(run.path).read().get("training", {}).get("asked")
    try:
        return None if recorded is None else Recipe.model_validate(recorded)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or "asked"
        why = f"{key[:80]!r}: {first_line(error)}"
        raise InputError(f"the recipe in {run.path / 'run.json'} cannot be read: {why}") from None


def train_variants(
    run: Run, changes: Mapping[Path, Mapping[str, Any]], *, workers: int = 1, progress: Progress = SILENT
) -> None:
    """Train the recipe of a run with changes, each into its directory."""
    recipe = recipe_of(run)
    recipes = {place: load_recipe(recipe, dict(change)) for place, change in changes.items()}
    run_all(workers, _train, list(recipes.items()), "trainings", progress)


def _train(job: tuple[Path, Recipe], progress: Progress = SILENT) -> None:
    train_together(dict([job]), resume=True, progress=progress)


def run_all(
    workers: int, work: Callable[..., None], jobs: Sequence[Any], what: str, progress: Progress = SILENT
) -> None:
    """Run jobs one after the other, or in ``workers`` processes.

    ``work`` takes a job and ``progress``; in a process of its own it reports no progress.
    """
    check_workers(workers)
    if workers == 1:
        for job in jobs:
            work(job, progress=progress)
        return
    progress.start(f"{len(jobs)} {what}", len(jobs))
    run_jobs(workers, partial(_silently, work), jobs, progress.advance)
    progress.finish()


def _silently(work: Callable[..., None], job: Any, send: Send) -> None:
    work(job)
    send(1)


def evaluate_variant(
    run: Run, place: Path, *, attack: str, data: str | None = None, progress: Progress = SILENT
) -> Run:
    """Evaluate a trained variant with the attack, radius and seed of the run, on its images or on other data."""
    recorded = RunDirectory(run.path).read().get("evaluation", {}).get("asked", {})
    report = run.report
    evaluate(
        str(place),
        report.dataset.name if data is None else data,
        attacks=[report.attacks[attack].spec],
        eps=report.threat.eps_text,
        norm=report.threat.norm,
        split=report.dataset.split,
        per_class=recorded.get("per_class"),
        seed=recorded.get("seed", 0),
        out=place,
        resume=True,
        progress=progress,
    )
    return Run.open(place)


def repeatable_attack(run: Run, attack: str | None) -> str:
    """Return the attack to repeat: the given one, else the only one of the report."""
    attacks = list(run.report.attacks)
    if attack is None and len(attacks) != 1:
        raise InputError(f"{run.path} was evaluated with {', '.join(attacks) or 'no attack'}; pass one as attack")
    chosen = attacks[0] if attack is None else attack
    run.key(chosen)
    if chosen not in attacks:
        raise InputError(f"attack = {chosen!r} cannot be repeated; expected one of {', '.join(attacks)}")
    return chosen
