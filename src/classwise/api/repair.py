"""``classwise.repair``: a higher worst class for a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.resolve import check_model_type, describe_model, make_settings, resolve_model
from classwise.config.options import RepairOptions, documented
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.evaluation.inputs import count_classes
from classwise.evaluation.perturbations import read_perturbations
from classwise.models.load import build_model, load_model, run_directory
from classwise.repairs.fit import LEAST
from classwise.repairs.images import check_disjoint, fitting_images, test_split
from classwise.repairs.methods import METHODS, Case, Method
from classwise.repairs.run import Origin, Repair, run_repair
from classwise.repairs.verdict import ModelResult, evaluate_on_test
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
    check_model_type(model)
    del arguments["progress"]
    options = RepairOptions(**arguments)
    repairer = _method(options)
    share = _parse_floor(floor)
    spec = None if isinstance(model, nn.Module) else str(model)
    found = None if spec is None else run_directory(spec)
    run = None if found is None else RunDirectory(found[0])
    if spec is not None and run is None and ":" not in spec:
        # A mistyped model and missing weights are reported before missing validation images.
        load_model(spec) if weights is None else build_model(spec)
    fitting = fitting_images(
        data,
        model="the module in memory" if spec is None else repr(spec),
        run=run,
        split=split,
        per_class=per_class,
        seed=seed,
        progress=progress,
    )
    loaded, _ = resolve_model(model, weights, fitting.images, device)
    origin = _origin(options, count_classes(loaded, fitting.images), spec, run)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    case = Case(
        **{part.name: getattr(fitting, part.name) for part in fields(fitting)},
        model=loaded,
        threat=_threat(eps, norm, origin.trained),
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
    if not evaluate:
        check_disjoint(data, fitting, progress)
    test_evaluation = _test_evaluation(options, case, origin) if evaluate else None
    name = str(Spec.parse(method))
    return run_repair(case, origin, name, repairer, evaluate=test_evaluation, directory=directory, resume=resume)


def _method(options: RepairOptions) -> Method:
    """Build the repair method; refuse options that it does not use."""
    method = build("repair method", METHODS, options.method)
    if type(method).uses != "validation":
        for name in ("floor", "rule", "targets"):
            if getattr(options, name) is not None:
                raise InputError(f"{name} applies to the method bias only, not to {Spec.parse(options.method).name}")
    elif options.per_class is not None and options.per_class < LEAST:
        raise InputError(
            f"class biases need at least {LEAST} fitting images of each class, got per_class = {options.per_class}; "
            "increase per_class or omit it"
        )
    return method


def _origin(options: RepairOptions, num_classes: int, spec: str | None, run: RunDirectory | None) -> Origin:
    """Describe where the model came from."""
    made = {} if run is None else run.producer()
    known = made.get("model", made.get("asked", {}).get("model"))
    return Origin(
        info=describe_model(options.model, options.weights),
        num_classes=num_classes,
        spec=known if spec is not None and isinstance(known, str) else spec,
        data_digest=made.get("data_digest"),
    )


def _test_evaluation(options: RepairOptions, case: Case, origin: Origin) -> Callable[..., ModelResult]:
    """Return the evaluation of a model on the test images."""
    images = test_split(options.data, options.test, case, case.progress)
    perturbations = read_perturbations(options.attacks, case.threat.text, case.threat.norm)
    settings = make_settings(case.model, images, perturbations, options, per_class=options.test_per_class)
    return partial(
        evaluate_on_test,
        images=images,
        settings=settings,
        trained_on=origin.data_digest,
        progress=case.progress,
    )


def _parse_floor(floor: float | None) -> float | None:
    """Convert a floor from percent to a fraction; None stays None."""
    if floor is None:
        return None
    if not 1 <= floor < 100:
        hint = f"; for {100 * floor:g}% pass {100 * floor:g}" if 0 < floor < 1 else ""
        raise InputError(f"the floor is a percentage from 1 to below 100, got {floor:g}{hint}")
    return floor / 100


def _threat(eps: float | str | None, norm: str | None, trained: Mapping[str, Any]) -> Threat:
    """The threat to repair for: as given, else that of the training, else Linf 8/255."""
    known = trained.get("eps"), trained.get("norm")
    chosen = eps if eps is not None else known[0] if isinstance(known[0], str) else "8/255"
    return Threat.parse(chosen, norm or (known[1] if isinstance(known[1], str) else "Linf"))
