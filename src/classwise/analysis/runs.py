"""Trainings that an analysis needs: the recipe of a run with something changed, each into a directory of its own.

Whatever is finished stays as it is, and what was broken off is continued, so that an analysis that trains for hours may
be interrupted and asked again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from classwise.analysis.subject import Subject
from classwise.api import evaluate, train_together
from classwise.errors import InputError
from classwise.progress import SILENT, Progress
from classwise.recipes import Recipe, load_recipe
from classwise.rundir import RunDirectory


def recipe_of(subject: Subject) -> Recipe:
    """What a run was trained by."""
    asked = RunDirectory(subject.path).read().get("training", {}).get("asked")
    if asked is None:
        raise InputError(f"{subject.path} is not the directory of a training, which this analysis repeats")
    return Recipe.model_validate(asked)


def trained(
    subject: Subject, changes: Mapping[Path, Mapping[str, Any]], *, workers: int = 1, progress: Progress = SILENT
) -> None:
    """Train a run's recipe anew, into each directory with these changes; with workers several at a time."""
    recipe = recipe_of(subject)
    recipes = {place: load_recipe(recipe, dict(change)) for place, change in changes.items()}
    if workers < 1:
        raise InputError(f"workers = {workers}: expected at least 1")
    if workers == 1:
        for place, one in recipes.items():
            train_together({place: one}, resume=True, progress=progress)
        return
    progress.start(f"{len(recipes)} trainings", len(recipes))
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for _ in pool.map(_train, recipes.items()):
            progress.advance(1)
    progress.finish()


def _train(job: tuple[Path, Recipe]) -> None:
    train_together(dict([job]), resume=True)


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
