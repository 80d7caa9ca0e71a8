"""``classwise.evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.resolve import checked_engine, describe_model, resolve_model, with_substitutes
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.data import load_data
from classwise.data.load import validation_images
from classwise.evaluation.command import command
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.evaluation.perturbations import read_perturbations
from classwise.evaluation.runner import EvaluationSettings, run_evaluation
from classwise.reporting import ClassReport
from classwise.storage.run_directory import RunDirectory, Section


def evaluate(
    model: nn.Module | str | Path,
    data: Any,
    *,
    attacks: Any = ("pgd",),
    eps: float | str | None = None,
    norm: str | None = None,
    weights: str | Path | None = None,
    split: str = "test",
    classes: Sequence[str] | None = None,
    per_class: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    engine: str = "auto",
    exhaustive: bool = False,
    until_worst_ci: float | None = None,
    margins: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    progress: Progress = SILENT,
) -> ClassReport:
    """Attack a model and report its accuracy class by class.

    ``model`` is any module or a model spec, ``data`` any Dataset, DataLoader, ``(x, y)`` pair or data spec; images
    are NCHW in [0, 1]. A module is used where it is; a spec is loaded onto ``device`` (a GPU where there is one).
    ``attacks`` is one or several of: a spec, an attack object of ours, of torchattacks, foolbox, ART or AutoAttack, a
    function ``attack(model, x, y)``, and ``corruptions``. ``engine`` says how attacks search: on a faster twin of the
    model where there is one (auto), or on the model itself (eager); verdicts are always the model's own. ``exhaustive``
    lets the attack ``fast`` run the whole ensemble on all that its cascade left. ``until_worst_ci`` attacks only as
    many examples of each class as it takes to know the accuracy of the worst class to within so many points. With
    ``out`` the verdicts and the report are kept there, and an interrupted evaluation can be resumed. ``margins`` also
    saves there the margin matrix of the images, and that of the validation images of a run directory: what
    ``classwise repair`` and ``analyze bias-share`` compute from. ``trust`` lets a model that is a program
    (``torchscript:FILE``) run.
    """
    if margins and out is None:
        raise InputError("margins are saved in a directory: give out too")
    images = load_data(data, split=split, classes=None if classes is None else tuple(classes), progress=progress)
    loaded, run = resolve_model(model, weights, images, device, trust=trust)
    perturbations = read_perturbations(attacks, eps, norm, exhaustive=exhaustive)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    report = run_evaluation(
        loaded,
        images,
        EvaluationSettings(
            attacks=with_substitutes(perturbations.attacks, images, device_of(loaded)),
            corruptions=perturbations.corruptions,
            threat=perturbations.threat,
            per_class=per_class,
            batch_size=batch_size,
            seed=seed,
            engine=checked_engine(engine),
            until_worst_ci=until_worst_ci,
        ),
        model_info=describe_model(model, weights),
        trained_on=None if run is None else RunDirectory(run).made().get("data_digest"),
        directory=directory,
        beside=_beside(run) if run and directory and run.resolve() == directory.path.resolve() else None,
        resume=resume,
        command=command(
            model,
            data,
            attacks,
            {
                "eps": eps,
                "norm": norm,
                "weights": weights,
                "split": split,
                "per_class": per_class,
                "seed": seed,
                "engine": engine,
                "exhaustive": exhaustive,
                "until_worst_ci": until_worst_ci,
                "margins": margins,
                "out": out,
                "trust": trust,
            },
        ),
        progress=progress,
    )
    if margins and directory is not None and report.verdicts is not None:
        find = partial(
            find_margins,
            loaded,
            threat=perturbations.threat,
            settings=MarginSettings(seed=seed),
            batch_size=batch_size,
            engine=checked_engine(engine),
            progress=progress,
        )
        find(images, report.verdicts.index, file=directory.margins)
        if run is not None and (held_out := validation_images(run, progress)) is not None:
            find(*held_out, file=directory.validation_margins)
    return report


def _beside(run: Path) -> Section:
    """The section of a run directory that its evaluation may lie beside."""
    return "training" if "training" in RunDirectory(run).read() else "repair"
