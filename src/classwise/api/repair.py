"""``classwise.repair``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classwise.api.resolve import checked_engine, describe_model, recipe_of, resolve_model, with_substitutes
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError, unknown
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.evaluation.inputs import count_classes
from classwise.evaluation.perturbations import read_perturbations
from classwise.evaluation.runner import EvaluationSettings
from classwise.models.load import build_model, run_directory
from classwise.repairs.fit import RULES
from classwise.repairs.images import check_apart, fitting_images, test_split
from classwise.repairs.methods import METHODS, Case
from classwise.repairs.run import Original, Repair, TestSetup, parse_floor, resolve_threat, run_repair
from classwise.storage.run_directory import RunDirectory


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
    """Raise the robust accuracy of a finished model's worst class, and evaluate the result on test images.

    The default method adds a constant to the logit of each class and trains nothing. It is fitted to the validation
    images of a run directory, or to the named ``split`` of other data; the split ``test`` is refused.

    ``model``, ``data``, ``weights``, ``eps``, ``norm``, ``seed``, ``device`` and ``engine`` are as in ``evaluate``; the
    threat defaults to that of the training. ``floor`` is the minimum robust accuracy of the worst class in percent,
    cross-validated on the fitting images; without it, ``rule`` selects a point of the frontier (rho, worst or tenth;
    see ``classwise.repairs.fit``). ``method`` names one of ``classwise.repairs.methods.METHODS``, with settings as
    ``name:key=value``. ``per_class`` limits the random fitting images of each class, ``targets`` the wrong classes
    attacked per image.

    With ``evaluate``, the original and the repaired model are evaluated with ``attacks`` on the test split of ``data``,
    or on ``test``. With ``out``, the repaired model, ``repair.json``, the page and the evaluations are saved; the
    directory can be used as a model spec, unless the model was a module in memory.

    Returns a ``Repair`` with the repaired ``model``, its ``report`` and the reports of both evaluations. Raises
    ``InputError`` for a floor that no class biases reach, for too few images and for models that return probabilities.
    """
    spec = Spec.parse(method)
    chosen = build("repair method", METHODS, method)
    if rule is not None and rule not in RULES:
        raise unknown("rule", rule, RULES)
    if type(chosen).uses != "validation":
        for option, value in (("floor", floor), ("rule", rule), ("targets", targets)):
            if value is not None:
                raise InputError(f"{option} applies to the method bias only, not to {spec.name}")
    if floor is not None and rule is not None:
        raise InputError("floor and rule exclude each other: pass one of them")
    share = parse_floor(floor)
    found = None if isinstance(model, nn.Module) else run_directory(str(model))
    run = None if found is None else found[0]
    if found is None and not isinstance(model, nn.Module) and ":" not in str(model):
        build_model(str(model))  # a mistyped model is reported before its missing validation images
    fitting = fitting_images(
        data, model=_name_of(model), run=run, split=split, per_class=per_class, seed=seed, progress=progress
    )
    loaded, _ = resolve_model(model, weights, fitting.images, device)
    made = {} if run is None else RunDirectory(run).made()
    recipe = {} if run is None else recipe_of(RunDirectory(run))
    threat = resolve_threat(eps, norm, recipe)
    original = Original(
        model=loaded,
        info=describe_model(model, weights),
        spec=_architecture_of(model, made),
        num_classes=count_classes(loaded, fitting.images),
        in_channels=int(fitting.images.images.shape[1]),
        trained=recipe,
        data_digest=made.get("data_digest"),
    )
    judges = None
    if evaluate:
        images = test_split(data, test, fitting, progress)
        perturbations = read_perturbations(attacks, threat.text, threat.norm)
        settings = EvaluationSettings(
            attacks=with_substitutes(perturbations.attacks, images, device_of(loaded)),
            corruptions=perturbations.corruptions,
            threat=perturbations.threat,
            per_class=test_per_class,
            batch_size=batch_size,
            seed=seed,
            engine=checked_engine(engine),
            until_worst_ci=None,
        )
        judges = TestSetup(images=images, settings=settings)
    else:
        check_apart(data, fitting, progress)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    known = None if run is None else RunDirectory(run).validation_margins
    case = Case(
        model=loaded,
        images=fitting.images,
        index=fitting.index,
        train=fitting.train,
        threat=threat,
        rule=rule or "rho",
        floor=share,
        seed=seed,
        batch_size=batch_size,
        engine=checked_engine(engine),
        targets=targets,
        margins_file=None if directory is None else directory.validation_margins,
        known_margins=known,
        progress=progress,
    )
    return run_repair(
        original,
        fitting,
        case,
        str(spec),
        chosen,
        judges=judges,
        directory=directory,
        resume=resume,
        progress=progress,
    )


def _name_of(model: nn.Module | str | Path) -> str:
    """What to call a model in messages."""
    return "the module in memory" if isinstance(model, nn.Module) else repr(str(model))


def _architecture_of(model: nn.Module | str | Path, made: Mapping[str, Any]) -> str | None:
    """The spec that builds the model's architecture; None for a module in memory."""
    if isinstance(model, nn.Module):
        return None
    known = made.get("model", made.get("asked", {}).get("model"))
    return known if isinstance(known, str) else str(model)
