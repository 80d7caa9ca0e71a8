"""``classwise.repair``: a higher worst class for a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.resolve import describe_model, make_settings, recipe_of, resolve_model
from classwise.config.options import RepairOptions, documented
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.evaluation.inputs import count_classes
from classwise.evaluation.perturbations import read_perturbations
from classwise.models.load import build_model, run_directory
from classwise.repairs.images import FittingImages, check_disjoint, fitting_images, test_split
from classwise.repairs.methods import METHODS, Case, Method
from classwise.repairs.run import Original, Repair, TestSetup, parse_floor, resolve_threat, run_repair
from classwise.storage.run_directory import RunDirectory


@documented(RepairOptions)
def repair(
    model: nn.Module | str | Path,
    data: Any,
    *,
    floor: float | None = None,
    rule: str | None = None,
    method: str = "bias",
    eps: float | str | None = None,
    norm: str | None = None,
    split: str | None = None,
    per_class: int | None = None,
    targets: int | None = None,
    test: Any = None,
    attacks: Any = ("fast", "corruptions:severity=3"),
    test_per_class: int | None = None,
    evaluate: bool = True,
    weights: str | Path | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    engine: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = SILENT,
) -> Repair:
    """Raise the worst-class robust accuracy of a trained model and evaluate the result on test images.

    The default method adds a constant to the logit of each class and trains nothing. It is fitted to the validation
    images of a run directory, or to the named ``split`` of other data; the split ``test`` is refused.

    With ``out``, the directory can be used as a model spec, unless the model was a module in memory.

    Returns a ``Repair`` with the repaired ``model``, its ``report`` and the reports of both evaluations. Raises
    ``InputError`` for a floor that no class biases reach, for too few images and for models that return probabilities.
    """
    arguments = {**locals()}
    del arguments["progress"]
    options = RepairOptions(**arguments)
    repairer = _method(options)
    share = parse_floor(floor)
    spec = None if isinstance(model, nn.Module) else str(model)
    found = None if spec is None else run_directory(spec)
    run = None if found is None else RunDirectory(found[0])
    if spec is not None and run is None and ":" not in spec:
        build_model(spec)  # a mistyped model is reported before its missing validation images
    fitting = fitting_images(
        data,
        model="the module in memory" if spec is None else repr(spec),
        run=None if run is None else run.path,
        split=split,
        per_class=per_class,
        seed=seed,
        progress=progress,
    )
    loaded, _ = resolve_model(model, weights, fitting.images, device)
    original = _original(options, loaded, fitting, spec, run)
    threat = resolve_threat(eps, norm, original.trained)
    judges = None
    if evaluate:
        judges = _test_setup(options, loaded, fitting, threat, progress)
    else:
        check_disjoint(data, fitting, progress)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    case = Case(
        model=loaded,
        images=fitting.images,
        index=fitting.index,
        train=fitting.train,
        threat=threat,
        rule=options.rule or "rho",
        floor=share,
        seed=seed,
        batch_size=batch_size,
        engine=options.engine,
        targets=targets,
        margins_file=None if directory is None else directory.validation_margins,
        known_margins=None if run is None else run.validation_margins,
        progress=progress,
    )
    return run_repair(
        original,
        fitting,
        case,
        str(Spec.parse(method)),
        repairer,
        judges=judges,
        directory=directory,
        resume=resume,
        progress=progress,
    )


def _method(options: RepairOptions) -> Method:
    """Build the repair method; refuse options that it does not use."""
    method = build("repair method", METHODS, options.method)
    if type(method).uses != "validation":
        for name in ("floor", "rule", "targets"):
            if getattr(options, name) is not None:
                raise InputError(f"{name} applies to the method bias only, not to {Spec.parse(options.method).name}")
    return method


def _original(
    options: RepairOptions, loaded: nn.Module, fitting: FittingImages, spec: str | None, run: RunDirectory | None
) -> Original:
    """Describe the model that is repaired."""
    made = {} if run is None else run.producer()
    known = made.get("model", made.get("asked", {}).get("model"))
    return Original(
        model=loaded,
        info=describe_model(options.model, options.weights),
        spec=known if spec is not None and isinstance(known, str) else spec,
        num_classes=count_classes(loaded, fitting.images),
        in_channels=int(fitting.images.images.shape[1]),
        trained={} if run is None else recipe_of(run),
        data_digest=made.get("data_digest"),
    )


def _test_setup(
    options: RepairOptions, loaded: nn.Module, fitting: FittingImages, threat: Threat, progress: Progress
) -> TestSetup:
    """The test images and attacks of the evaluation before and after."""
    images = test_split(options.data, options.test, fitting, progress)
    perturbations = read_perturbations(options.attacks, threat.text, threat.norm)
    return TestSetup(
        images=images, settings=make_settings(loaded, images, perturbations, options, per_class=options.test_per_class)
    )
