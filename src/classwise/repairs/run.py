"""Run a repair: apply the method, write the run directory, evaluate on test images, report."""

# N examples, K classes

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from classwise.config.plugins import absolute
from classwise.config.recipes import repaired_recipe
from classwise.core.errors import InputError
from classwise.metrics.comparison import Bools
from classwise.models.heads import Biased
from classwise.models.normalize import Normalized
from classwise.models.weights import digest_model
from classwise.repairs.fit import Point
from classwise.repairs.methods.base import Case, Method, Repaired, settings_text
from classwise.repairs.verdict import ModelResult, compare_on_test
from classwise.reporting import ClassReport
from classwise.reporting.repair import Accuracies, FittedOn, FrontierPoint, RepairReport
from classwise.reporting.report import Result, ThreatInfo
from classwise.storage.files import digest, digest_json
from classwise.storage.margins import Margins
from classwise.storage.run_directory import RunDirectory, versions
from classwise.training.checkpoint import save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the model to repair came from."""

    info: dict[str, Any]
    """Description of the model in reports."""
    num_classes: int
    spec: str | None = None
    """Spec of the architecture, or of the whole model; None for a module in memory."""
    data_digest: str | None = None
    """Digest of the images it was trained on, if known."""

    @property
    def trained(self) -> dict[str, Any]:
        """Training recipe, if known."""
        return dict(self.info.get("trained", {}))

    @property
    def named(self) -> dict[str, Any]:
        """Model description without the training recipe."""
        return {key: value for key, value in self.info.items() if key != "trained"}


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
    case: Case,
    origin: Origin,
    name: str,
    method: Method,
    *,
    evaluate: Callable[..., ModelResult] | None,
    directory: RunDirectory | None,
    resume: bool,
) -> Repair:
    """Repair a model and save it. Evaluate both models on test images with ``evaluate``, if given.

    ``evaluate`` is ``evaluate_on_test`` with images and settings.
    """
    recorded = {
        "method": name,
        "settings": settings_text(method),
        "choice": _choice(case, method),
        "data": f"{case.images.name}/{case.images.split}",
        "threat": f"{case.threat.norm} {case.threat.text}",
        "seed": case.seed,
        "targets": case.targets,
        "source": origin.named,
    }
    if directory is not None:
        index = digest(np.ascontiguousarray(case.index).data.cast("B"))
        identity = [recorded, digest_model(case.model), case.images.digest(), index]
        fingerprint = digest_json([identity, versions()["classwise"], versions()["torch"]])
        directory.claim("repair", fingerprint, {"asked": recorded}, resume=resume)
    try:
        repaired = method(case)
    except InputError:  # for example an unreachable floor: another repair may use the directory and its margins
        if directory is not None:
            directory.release("repair")
        raise
    report = _report(case, origin, name, method, repaired)
    if directory is not None:
        _save_repaired(case, origin, repaired, directory)
        report.to_json(directory.repair)
    before = after = None
    if evaluate is not None:
        began = time.perf_counter()
        first = None if directory is None else RunDirectory(directory.path / "original")
        started = first is not None and first.read().get("evaluation") is not None
        before = evaluate(case.model, model_info=origin.info, directory=first, beside=None, resume=resume or started)
        info = _info(origin, report, directory)
        after = evaluate(repaired.model, model_info=info, directory=directory, beside="repair", resume=resume)
        seconds = {**report.seconds, "verdict": round(time.perf_counter() - began, 3)}
        report = report.model_copy(update={"test": compare_on_test(before, after), "seconds": seconds})
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


def _choice(case: Case, method: Method) -> str | None:
    if type(method).uses != "validation":
        return None
    return f"rule {case.rule}" if case.floor is None else f"floor {100 * case.floor:g}%"


def _report(case: Case, origin: Origin, name: str, method: Method, repaired: Repaired) -> RepairReport:
    images, uses, threat = case.images, type(method).uses, case.threat
    classes = list(images.classes or map(str, range(origin.num_classes)))
    index = case.train if uses == "training" else case.index
    trains = uses == "training" and not np.array_equal(case.train, case.index)
    fitted_on = FittedOn(
        data=images.name,
        split=images.split,
        n=len(index),
        per_class=np.bincount(images.labels[index], minlength=len(classes)).tolist(),
        digest=images.digest(),
        origin="training images of the run" if trains else case.origin,
    )
    plain: dict[str, Any] = {
        "model": origin.named,
        "method": name,
        "settings": settings_text(method),
        "classes": classes,
        "threat": ThreatInfo(norm=threat.norm, eps=threat.eps, eps_text=threat.text),
        "choice": _choice(case, method),
        "fitted_on": None if uses == "none" else fitted_on,
        "layer": repaired.layer,
        "seconds": repaired.seconds,
        "notes": [*([] if uses == "none" else case.notes), *repaired.notes],
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


def _save_repaired(case: Case, origin: Origin, repaired: Repaired, directory: RunDirectory) -> None:
    """Write the repaired model so that the directory can be loaded as one."""
    inner = repaired.model.model if isinstance(repaired.model, Biased) else repaired.model
    normalization = None
    if origin.spec is not None and isinstance(inner, Normalized) and "normalize=" not in origin.spec:
        layer = inner.normalize  # the normalization came with the weights, not from the architecture's spec
        normalization = {"mean": layer.mean.flatten().tolist(), "std": layer.std.flatten().tolist()}
    directory.note(
        "repair",
        model=None if origin.spec is None else absolute(origin.spec),
        wrapped=isinstance(repaired.model, Biased),
        normalization=normalization,
        num_classes=origin.num_classes,
        in_channels=int(case.images.images.shape[1]),
        data_digest=origin.data_digest,
        trained=origin.trained,
    )
    save_weights(directory.checkpoints / "best.safetensors", repaired.model)


def _info(origin: Origin, report: RepairReport, directory: RunDirectory | None) -> dict[str, Any]:
    """The description of the repaired model in its report."""
    if directory is None:
        return {"name": f"{origin.info.get('name', 'model')} + {report.method}"}
    return {
        "name": directory.path.resolve().name,
        "spec": str(directory.path),
        "trained": repaired_recipe(origin.trained, report.method, report.choice),
    }
