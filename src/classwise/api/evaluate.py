"""``classwise.evaluate``: accuracy class by class under attack."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.resolve import check_model_type, describe_model, make_settings, resolve_model, with_exhaustive_fast
from classwise.config.options import EvaluateOptions, command_line, documented
from classwise.core.progress import SILENT, Progress
from classwise.data import load_data
from classwise.data.load import validation_images
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.evaluation.perturbations import read_perturbations
from classwise.evaluation.runner import run_evaluation
from classwise.reporting import ClassReport
from classwise.storage.run_directory import RunDirectory, Section


@documented(EvaluateOptions)
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

    Without ``out`` nothing is saved, and an interrupted evaluation cannot be resumed. With ``margins`` the margin
    matrix of the validation images of a run directory is saved too.
    """
    arguments = {**locals()}
    check_model_type(model)
    del arguments["progress"]
    if exhaustive:
        arguments["attacks"] = with_exhaustive_fast(attacks)
    options = EvaluateOptions(**arguments)
    perturbations = read_perturbations(
        options.attacks, eps, norm
    )  # parsed first, so that a mistyped attack is reported before data is loaded
    images = load_data(data, split=split, classes=None if classes is None else tuple(classes), progress=progress)
    loaded, run = resolve_model(model, weights, images, device, trust=trust)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    report = run_evaluation(
        loaded,
        images,
        make_settings(loaded, images, perturbations, options, per_class=per_class, until_worst_ci=until_worst_ci),
        model_info=describe_model(model, weights),
        trained_on=None if run is None else RunDirectory(run).producer().get("data_digest"),
        directory=directory,
        beside=_own_section(run) if run and directory and run.resolve() == directory.path.resolve() else None,
        resume=resume,
        command=command_line("evaluate", options),
        progress=progress,
    )
    if margins and directory is not None and report.verdicts is not None:
        find = partial(
            find_margins,
            loaded,
            threat=perturbations.threat,
            settings=MarginSettings(seed=seed),
            batch_size=batch_size,
            engine=options.engine,
            progress=progress,
        )
        find(images, report.verdicts.index, file=directory.margins)
        if run is not None and (held_out := validation_images(run, progress)) is not None:
            find(*held_out, file=directory.validation_margins)
    return report


def _own_section(run: Path) -> Section:
    """Return the section of run.json that describes how the model was trained or repaired."""
    return "training" if "training" in RunDirectory(run).read() else "repair"
