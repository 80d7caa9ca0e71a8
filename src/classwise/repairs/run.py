"""A whole repair: method, repaired run directory, test evaluation, report."""

# N examples, K classes

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from classwise.config.plugins import absolute
from classwise.config.recipes import repaired_recipe
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.data import ImageSet
from classwise.evaluation.runner import EvaluationSettings
from classwise.metrics.comparison import Bools
from classwise.models.heads import Biased
from classwise.models.normalize import Normalized
from classwise.models.weights import digest_model
from classwise.repairs.fit import Point
from classwise.repairs.images import FittingImages
from classwise.repairs.methods.base import Case, Method, Repaired, settings_text
from classwise.repairs.verdict import ModelResult, compare_on_test, evaluate_on_test
from classwise.reporting import ClassReport
from classwise.reporting.repair import Accuracies, FittedOn, FrontierPoint, RepairReport
from classwise.reporting.report import Result, ThreatInfo
from classwise.storage.files import digest, digest_json
from classwise.storage.margins import Margins
from classwise.storage.run_directory import RunDirectory, versions
from classwise.training.checkpoint import save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The model to repair, and where it came from."""

    model: nn.Module
    info: dict[str, Any]
    """Description of the model in reports."""
    spec: str | None
    """Spec of the architecture, or of the whole model; None for a module in memory."""
    num_classes: int
    in_channels: int
    trained: Mapping[str, Any]
    """Training recipe, if known."""
    data_digest: str | None
    """Digest of the images it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSetup:
    """Test images and settings of the test evaluation."""

    images: ImageSet
    settings: EvaluationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A finished repair."""

    model: nn.Module
    """The repaired model."""
    report: RepairReport
    directory: Path | None
    report_before: ClassReport | None = None
    report_after: ClassReport | None = None
    """Test evaluations of the original and of the repaired model."""
    margins: Margins | None = None

    @property
    def biases(self) -> list[float] | None:
        """Biases added to the logits, by class; None for a method that changes other weights."""
        return self.report.biases


def run_repair(
    original: Original,
    fitting: FittingImages,
    case: Case,
    name: str,
    method: Method,
    *,
    judges: TestSetup | None,
    directory: RunDirectory | None,
    resume: bool,
    progress: Progress = SILENT,
) -> Repair:
    """Repair a model, save it and evaluate it on the test images."""
    choice = _choice(case, method)
    recorded = {
        "method": name,
        "settings": settings_text(method),
        "choice": choice,
        "data": f"{fitting.images.name}/{fitting.images.split}",
        "threat": f"{case.threat.norm} {case.threat.text}",
        "seed": case.seed,
        "targets": case.targets,
        "source": {key: value for key, value in original.info.items() if key != "trained"},
    }
    if directory is not None:
        index = digest(np.ascontiguousarray(fitting.index).data.cast("B"))
        identity = [recorded, digest_model(original.model), fitting.images.digest(), index]
        fingerprint = digest_json([identity, versions()["classwise"], versions()["torch"]])
        directory.claim("repair", fingerprint, {"asked": recorded}, resume=resume)
    repaired = method(case)
    report = _report(original, fitting, case, name, method, choice, repaired)
    if directory is not None:
        _save_repaired(original, repaired, directory)
        report.to_json(directory.repair)
    before = after = None
    if judges is not None:
        began = time.perf_counter()
        before, after = _evaluate_both(original, repaired, report, judges, directory, resume, progress)
        test = compare_on_test(before, after)
        seconds = {**report.seconds, "verdict": round(time.perf_counter() - began, 3)}
        report = report.model_copy(update={"test": test, "seconds": seconds})
    if directory is not None:
        report.to_json(directory.repair)
        report.to_html(directory.path / "repair.html")
        directory.finish("repair")
    return Repair(
        model=repaired.model,
        report=report,
        directory=None if directory is None else directory.path,
        report_before=None if before is None else before.report,
        report_after=None if after is None else after.report,
        margins=repaired.margins,
    )


def _evaluate_both(
    original: Original,
    repaired: Repaired,
    report: RepairReport,
    judges: TestSetup,
    directory: RunDirectory | None,
    resume: bool,
    progress: Progress,
) -> tuple[ModelResult, ModelResult]:
    """Evaluate the original and the repaired model on the test images."""
    first = None if directory is None else RunDirectory(directory.path / "original")
    started = first is not None and first.read().get("evaluation") is not None
    evaluate = partial(
        evaluate_on_test,
        images=judges.images,
        settings=judges.settings,
        trained_on=original.data_digest,
        progress=progress,
    )
    return (
        evaluate(original.model, model_info=original.info, directory=first, beside=None, resume=resume or started),
        evaluate(
            repaired.model,
            model_info=_info(original, report, directory),
            directory=directory,
            beside="repair",
            resume=resume,
        ),
    )


def _choice(case: Case, method: Method) -> str | None:
    if type(method).uses != "validation":
        return None
    return f"rule {case.rule}" if case.floor is None else f"floor {100 * case.floor:g}%"


def _report(
    original: Original,
    fitting: FittingImages,
    case: Case,
    name: str,
    method: Method,
    choice: str | None,
    repaired: Repaired,
) -> RepairReport:
    classes = list(fitting.images.classes or (str(label) for label in range(original.num_classes)))
    uses, threat = type(method).uses, case.threat
    index = case.train if uses == "training" else case.index
    trains = uses == "training" and not np.array_equal(case.train, case.index)
    counts = np.bincount(fitting.images.labels[index], minlength=len(classes))
    fitted_on = FittedOn(
        data=fitting.images.name,
        split=fitting.images.split,
        n=len(index),
        per_class=counts.tolist(),
        digest=fitting.images.digest(),
        origin="training images of the run" if trains else fitting.origin,
    )
    plain: dict[str, Any] = {
        "model": {key: value for key, value in original.info.items() if key != "trained"},
        "method": name,
        "settings": settings_text(method),
        "classes": classes,
        "threat": ThreatInfo(norm=threat.norm, eps=threat.eps, eps_text=threat.text),
        "choice": choice,
        "fitted_on": None if uses == "none" else fitted_on,
        "layer": repaired.layer,
        "seconds": repaired.seconds,
        "notes": [*([] if uses == "none" else fitting.notes), *repaired.notes],
    }
    if repaired.fit is None or repaired.margins is None:
        return RepairReport(**plain)
    fit, margins = repaired.fit, repaired.margins

    def accuracies(natural: Bools, robust: Bools) -> Accuracies:
        wrong = np.where(margins.label == 0, 1, 0)  # any other label
        results = [
            Result.from_predictions(margins.label, np.where(correct, margins.label, wrong), classes)
            for correct in (natural, robust)
        ]
        return Accuracies(natural=results[0], robust=results[1])

    return RepairReport(
        **plain,
        search={
            key: margins.info[key]
            for key in ("targets", "steps", "searches", "nearest", "seed", "audit")
            if key in margins.info
        },
        biases=[round(float(bias), 5) for bias in fit.biases],
        weight=fit.weight,
        selected=_point(fit.selected),
        frontier=[_point(point) for point in (fit.start, *fit.points)],
        fitting_before=accuracies(margins.without_attack.min(axis=1) > 0, margins.attacked.min(axis=1) > 0),
        cross_validated=accuracies(fit.held_out_natural, fit.held_out_robust),
    )


def _point(point: Point) -> FrontierPoint:
    return FrontierPoint(
        weight=round(point.weight, 5),
        average=_percent(point.held_out.average),
        worst=_percent(point.held_out.worst),
        tenth=_percent(point.held_out.tenth),
        fitted_average=_percent(point.fitted.average),
        fitted_worst=_percent(point.fitted.worst),
        biases=[round(float(bias), 5) for bias in point.biases],
    )


def _percent(share: float) -> float:
    return round(100 * share, 4)


def _save_repaired(original: Original, repaired: Repaired, directory: RunDirectory) -> None:
    """Write the repaired model so that the directory can be loaded as one."""
    inner = repaired.model.model if isinstance(repaired.model, Biased) else repaired.model
    normalization = None
    if original.spec is not None and isinstance(inner, Normalized) and "normalize=" not in original.spec:
        layer = inner.normalize  # the normalization came with the weights, not from the architecture's spec
        normalization = {"mean": layer.mean.flatten().tolist(), "std": layer.std.flatten().tolist()}
    directory.note(
        "repair",
        model=None if original.spec is None else absolute(original.spec),
        wrapped=isinstance(repaired.model, Biased),
        normalization=normalization,
        num_classes=original.num_classes,
        in_channels=original.in_channels,
        data_digest=original.data_digest,
        trained=dict(original.trained),
    )
    save_weights(directory.checkpoints / "best.safetensors", repaired.model)


def _info(original: Original, report: RepairReport, directory: RunDirectory | None) -> dict[str, Any]:
    """The description of the repaired model in its report."""
    if directory is None:
        return {"name": f"{original.info.get('name', 'model')} + {report.method}"}
    return {
        "name": directory.path.resolve().name,
        "spec": str(directory.path),
        "trained": repaired_recipe(original.trained, report.method, report.choice),
    }


def parse_floor(floor: float | None) -> float | None:
    """A floor in percent as a fraction."""
    if floor is None:
        return None
    if not 1 <= floor < 100:
        hint = f"; for {100 * floor:g}% pass {100 * floor:g}" if 0 < floor < 1 else ""
        raise InputError(f"the floor is a percentage from 1 to below 100, got {floor:g}{hint}")
    return floor / 100


def resolve_threat(eps: float | str | None, norm: str | None, trained: Mapping[str, Any]) -> Threat:
    """The threat to repair for: as given, else that of the training, else Linf 8/255."""
    known = trained.get("eps"), trained.get("norm")
    chosen = eps if eps is not None else known[0] if isinstance(known[0], str) else "8/255"
    return Threat.parse(chosen, norm or (known[1] if isinstance(known[1], str) else "Linf"))
