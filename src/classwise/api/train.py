"""``classwise.train``: from recipes to run directories, with the optional repair of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.repair import repair
from classwise.config.options import TrainOptions, documented
from classwise.config.plugins import absolute
from classwise.config.recipes import Recipe, load_recipe
from classwise.config.spec import Spec
from classwise.core.devices import pick_device
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.models.load import load_model
from classwise.storage.files import digest_json
from classwise.storage.run_directory import RunDirectory, versions
from classwise.training.distributed import ProcessGroup, process_group
from classwise.training.loggers import Logger, make_loggers
from classwise.training.loop import Job, Outcome, fit
from classwise.training.plan import make_plan
from classwise.training.processes import fit_in_processes
from classwise.training.workers import check_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training run."""

    directory: Path
    recipe: Recipe
    outcome: Outcome
    classes: tuple[str, ...]
    repaired: Path | None = None
    """Run directory of the recipe's repair, if any."""

    def load(self, which: str = "best") -> nn.Module:
        """Load the trained model: ``best`` on validation images, or ``last``."""
        return load_model(f"{self.directory}@{which}")


@documented(TrainOptions)
def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    device: str | torch.device | None = None,
    loggers: Sequence[str | Logger] = (),
    progress: Progress = SILENT,
    **overrides: Any,
) -> Run:
    """Train one recipe into a run directory. Further keywords override keys of the recipe, as ``seed=1``.

    Loggers do not change the trained weights.
    """
    recipe = load_recipe(recipe, overrides)
    return train_together({out: recipe}, resume=resume, device=device, loggers=loggers, progress=progress)[0]


@documented(TrainOptions)
def train_together(
    recipes: Mapping[str | Path, str | Path | Recipe],
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    workers: int = 1,
    loggers: Sequence[str | Logger] = (),
    progress: Progress = SILENT,
) -> list[Run]:
    """Train several recipes, each into the run directory that is its key.

    The runs are interleaved in this process. With ``workers``, that many runs train at a time, each in its own process;
    they share the cores and the GPU. Results equal those of separate runs, on a CPU up to rounding with fewer threads.
    """
    if not recipes:
        raise InputError("no recipe to train: pass at least one")
    check_workers(workers)
    loaded = {RunDirectory(Path(out).expanduser()): load_recipe(recipe) for out, recipe in recipes.items()}
    with process_group(pick_device(device)) as group:
        if not group.is_main:
            loggers, progress = (), SILENT
        if workers > 1 and group.size > 1:
            raise InputError(
                "workers and processes are mutually exclusive: workers train several runs at a time, processes split "
                "the batches of one run"
            )
        return _train(loaded, group, resume, workers, make_loggers(loggers), progress)


def _train(
    recipes: Mapping[RunDirectory, Recipe],
    group: ProcessGroup,
    resume: bool,
    workers: int,
    loggers: Sequence[Logger],
    progress: Progress,
) -> list[Run]:
    with group.main_first():
        plans = [make_plan(recipe, group.device, progress, group) for recipe in recipes.values()]
    jobs = []
    for (directory, recipe), plan in zip(recipes.items(), plans, strict=True):
        settings = recipe.model_dump()
        digests = [phase.images.digest() for phase in plan.phases]
        fingerprint = digest_json([settings, digests, versions()["classwise"], versions()["torch"]])
        details = {
            "asked": {**settings, "model": absolute(str(Spec.parse(recipe.model)))},
            "num_classes": plan.num_classes,
            "in_channels": plan.images.images.shape[1],
            "data_digest": plan.images.digest(),
        }
        claim = partial(directory.claim, "training", fingerprint, details, resume=resume)
        jobs.append(Job(plan, directory, group.on_main(claim)))
    if workers == 1:
        outcomes = fit(jobs, progress, loggers)
    else:
        make_plans = [partial(make_plan, recipe, group.device) for recipe in recipes.values()]
        outcomes = fit_in_processes(jobs, make_plans, workers, progress, loggers)
    for job, outcome in zip(jobs, outcomes, strict=True):
        if group.is_main:
            best = {"best_epoch": outcome.best_epoch, "best_score": outcome.best_score, "rule": job.plan.select}
            job.directory.finish("training", **best)
    runs = []
    for job, recipe, outcome in zip(jobs, recipes.values(), outcomes, strict=True):
        repaired = _repair(job.directory, recipe, group, progress)
        classes = job.plan.task.classes
        runs.append(
            Run(directory=job.directory.path, recipe=recipe, outcome=outcome, classes=classes, repaired=repaired)
        )
    return runs


def _repair(directory: RunDirectory, recipe: Recipe, group: ProcessGroup, progress: Progress) -> Path | None:
    """Repair the run as its recipe requires, fitted to the validation images of the run; return the directory."""
    if recipe.repair is None:
        return None
    out = directory.path / "repaired"
    if group.is_main:
        try:
            repair(
                directory.path,
                recipe.data_at_the_end,
                **recipe.repair.model_dump(),
                out=out,
                evaluate=False,
                resume=True,
                device=group.device,
                seed=recipe.seed,
                engine=recipe.engine,
                progress=progress,
            )
        except InputError as error:  # the training is finished and kept
            warnings.warn(f"{directory.path} was trained but not repaired: {error}", stacklevel=2)
            return None
    return out
