"""Trainings that an analysis needs: the recipe of a run with something changed, each into a directory of its own.

Whatever is finished stays as it is, and what was broken off is continued, so that an analysis that trains for hours may
be interrupted and asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from classwise.analysis.run import Subject
from classwise.api.evaluate import evaluate
from classwise.api.train import train_together
from classwise.config.recipes import Recipe, load_recipe
from classwise.config.spec import first_line
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.storage.run_directory import RunDirectory
from classwise.training.workers import Send, check_workers, run_jobs


def recipe_of(subject: Subject) -> Recipe:
    """What a run was trained by."""
    recipe = recipe_if_trained(subject)
    if recipe is None:
        raise InputError(f"{subject.path} is not the directory of a training, which this analysis repeats")
    return recipe


def recipe_if_trained(subject: Subject) -> Recipe | None:
    """What a run was trained by, where it was trained here."""
    asked = RunDirectory(subject.path).read().get("training", {}).get("asked")
    try:
        return None if asked is None else Recipe.model_validate(asked)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or "asked"
        why = f"{key[:80]!r}: {first_line(error)}"
        raise InputError(f"{subject.path / 'run.json'} holds no recipe that can be read: {why}") from None


def trained(
    subject: Subject, changes: Mapping[Path, Mapping[str, Any]], *, workers: int = 1, progress: Progress = SILENT
) -> None:
    """Train a run's recipe anew, into each directory with these changes; with workers several at a time."""
    recipe = recipe_of(subject)
    recipes = {place: load_recipe(recipe, dict(change)) for place, change in changes.items()}
    each_done(workers, _train, list(recipes.items()), "trainings", progress)


def _train(job: tuple[Path, Recipe], progress: Progress = SILENT) -> None:
    train_together(dict([job]), resume=True, progress=progress)


def each_done(
    workers: int, work: Callable[..., None], jobs: Sequence[Any], what: str, progress: Progress = SILENT
) -> None:
    """Do jobs one after the other, or with workers several at a time.

    ``work`` takes a job and ``progress``; in a process of its own it reports nothing.
    """
    check_workers(workers)
    if workers == 1:
        for job in jobs:
            work(job, progress=progress)
        return
    progress.start(f"{len(jobs)} {what}", len(jobs))
    run_jobs(workers, partial(_silently, work), jobs, progress.advance)
    progress.finish()


def _silently(work: Callable[..., None], job: Any, tell: Send) -> None:
    work(job)
    tell(1)


def evaluated(subject: Subject, place: Path, *, attack: str, progress: Progress = SILENT) -> Subject:
    """A trained run, attacked as the subject was: the same images, attack, radius and seed."""
    return evaluated_on(subject, place, subject.report.dataset.name, attack=attack, progress=progress)


def evaluated_on(subject: Subject, place: Path, data: str, *, attack: str, progress: Progress = SILENT) -> Subject:
    """The same on other images."""
    asked = RunDirectory(subject.path).read().get("evaluation", {}).get("asked", {})
    report = subject.report
    evaluate(
        str(place),
        data,
        attacks=[report.attacks[attack].spec],
        eps=report.threat.eps_text,
        norm=report.threat.norm,
        split=report.dataset.split,
        per_class=asked.get("per_class"),
        seed=asked.get("seed", 0),
        out=place,
        resume=True,
        progress=progress,
    )
    return Subject.open(place)


def one_attack(subject: Subject, attack: str | None) -> str:
    """The attack that is repeated: the one that is named, else the only one of the report."""
    attacks = list(subject.report.attacks)
    if attack is None and len(attacks) != 1:
        raise InputError(f"{subject.path} was attacked by {', '.join(attacks) or 'nobody'}: choose one attack")
    chosen = attacks[0] if attack is None else attack
    subject.key(chosen)
    if chosen not in attacks:
        raise InputError(f"{chosen} is no attack that can be repeated: choose one of {', '.join(attacks)}")
    return chosen
