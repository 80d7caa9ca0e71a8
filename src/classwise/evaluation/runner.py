"""Evaluate a model: from the model and images to verdicts and a report.

Natural predictions come first, then the probes of the trust checks, then each attack and each corruption
(``classwise.evaluation.stages``). Verdicts are reached by float32 forward passes of the model itself
(``classwise.evaluation.judge``) and saved every few seconds.
"""

# N examples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import release_memory, search_model
from classwise.attacks import ATTACKS
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, has_gradients
from classwise.core.progress import Progress
from classwise.data import ImageSet, ordered
from classwise.evaluation.allocation import Rounds
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.inputs import SAMPLE, SAMPLE_BATCH, choose_examples, count_classes, default_batch_size
from classwise.evaluation.judge import predict
from classwise.evaluation.parts import AttackParts
from classwise.evaluation.perturbations import Perturbations
from classwise.evaluation.report import make_report
from classwise.evaluation.stages import Costs, Run, predict_natural, run_attack, run_corruption
from classwise.evaluation.trust.probes import ProbeResult, run_probes
from classwise.metrics.comparison import Bools
from classwise.models.weights import digest_model
from classwise.reporting import ClassReport
from classwise.storage.files import digest_json, write_json
from classwise.storage.run_directory import RunDirectory, Section, versions
from classwise.storage.verdicts import Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings(Perturbations):
    """Attacks and settings of an evaluation. With the model and the images they determine the verdicts."""

    per_class: int | None
    """Number of examples of each class to evaluate, the first ones. None: all."""
    batch_size: int | None
    """None: derived from the image size."""
    seed: int
    engine: EngineName
    until_worst_ci: float | None
    """Stop once the worst class's 95% interval is within ± this many percentage points. None: attack all examples."""

    def __post_init__(self) -> None:
        if self.until_worst_ci is not None and not 0 < self.until_worst_ci < 50:
            raise InputError(
                f"until_worst_ci must be above 0 and below 50 percentage points, got {self.until_worst_ci}"
            )
        if self.until_worst_ci is not None and not self.attacks:
            raise InputError("until_worst_ci needs at least one attack")

    def record(self, images: ImageSet) -> dict[str, Any]:
        """Return the settings for ``run.json``. The batch size is left out because it has no effect on verdicts."""
        return {
            "data": f"{images.name}/{images.split}",
            "attacks": {key: repr(attack) for key, (_, attack) in self.attacks.items()},
            "corruptions": [repr(corruption) for corruption in self.corruptions.values()],
            "threat": f"{self.threat.norm} {self.threat.text}",
            "per_class": self.per_class,
            "seed": self.seed,
            "engine": self.engine,
            "until_worst_ci": self.until_worst_ci,
        }


def run_evaluation(
    model: nn.Module,
    images: ImageSet,
    settings: EvaluationSettings,
    *,
    model_info: dict[str, Any],
    trained_on: str | None,
    directory: RunDirectory | None,
    beside: Section | None,
    resume: bool,
    command: str | None = None,
    progress: Progress,
) -> ClassReport:
    """Evaluate a model under every attack and every corruption.

    ``trained_on`` is the digest of its training images, if known. ``beside`` names the section of ``run.json`` that
    ``directory`` may already hold, as for an evaluation in the run directory of the model.
    """
    device = device_of(model)
    num_classes = count_classes(model, images)
    classes = list(images.classes or map(str, range(num_classes)))
    parts = [AttackParts.of(key, spec, attack, num_classes) for key, (spec, attack) in settings.attacks.items()]
    _check_gradients(model, parts)
    index = choose_examples(images, settings.per_class, num_classes)
    pending = Verdicts.pending(
        index,
        np.asarray(images.labels[index]),
        attacks=_distinct([column for one in parts for column in (one.key, *one.variants)]),
        stages=[column for one in parts for column in one.stages],
        corrupted=settings.corruptions,
    )
    batch_size = settings.batch_size or default_batch_size(images, device)
    sample = [x for x, _, _ in ordered(images, index[:SAMPLE], min(SAMPLE_BATCH, batch_size), device)]
    recorded = settings.record(images)
    fingerprint = digest_json([recorded, images.digest(), _identity(model, sample)])
    searched = search_model(model, torch.cat(sample)[: max(batch_size, SAMPLE_BATCH)], settings.engine)
    effort: Costs = {}

    def save() -> None:
        if directory is not None:
            directory.note("evaluation", effort=effort)
            pending.save(directory.verdicts, fingerprint)

    try:
        if directory is not None:
            named = {name: value for name, value in model_info.items() if name != "trained"}
            details = {"asked": {**recorded, "model": named}}
            effort = _claim(directory, pending, fingerprint, details, resume=resume, beside=beside)
        run = Run(
            model=model,
            searched=searched,
            images=images,
            threat=settings.threat,
            seed=settings.seed,
            verdicts=pending,
            effort=effort,
            loop=BatchLoop(size=batch_size, progress=progress, save=save, free=partial(release_memory, searched)),
        )
        goal = settings.until_worst_ci
        rounds = None if goal is None else Rounds.of(run.verdicts.label, num_classes, goal, settings.seed)
        try:
            probed, rows, count = _run_stages(run, settings, parts, rounds)
        finally:
            save()
        report = make_report(
            run,
            parts,
            settings.corruptions,
            probed,
            rows,
            classes,
            model_info=model_info,
            trained_on=trained_on,
            command=command,
            **({} if rounds is None else rounds.results(rows, count, run.verdicts)),
        )
    finally:
        release_memory(searched)
    if directory is not None:
        _save(report, directory, fingerprint)
    return report


def _claim(
    directory: RunDirectory,
    pending: Verdicts,
    fingerprint: str,
    details: dict[str, Any],
    *,
    resume: bool,
    beside: Section | None,
) -> Costs:
    """Claim a directory, fill ``pending`` with the verdicts saved there, and return the effort so far."""
    resumed = directory.claim("evaluation", fingerprint, details, resume=resume, beside=beside)
    if resumed and directory.verdicts.exists():
        saved, saved_fingerprint = Verdicts.load(directory.verdicts)
        if saved_fingerprint == fingerprint:
            _fill(pending, saved)
    effort: Costs = directory.read()["evaluation"].get("effort", {})
    return effort


def _fill(pending: Verdicts, saved: Verdicts) -> None:
    """Copy a saved table into a pending one. A finished adaptive evaluation saves only attacked examples."""
    rows = np.isin(pending.index, saved.index)
    pending.natural[rows] = saved.natural
    for columns, known in (
        (pending.attacks, saved.attacks),
        (pending.stages, saved.stages),
        (pending.corrupted, saved.corrupted),
    ):
        for key, column in columns.items():
            column[rows] = known[key]
    for effort, known in ((pending.forwards, saved.forwards), (pending.backwards, saved.backwards)):
        for key, column in known.items():
            effort[key] = np.zeros(len(pending), dtype=np.int64)
            effort[key][rows] = column
    for key, margins in saved.margins.items():
        pending.margins[key] = np.full(len(pending), np.nan, dtype=np.float32)
        pending.margins[key][rows] = margins


def _run_stages(
    run: Run, settings: EvaluationSettings, parts: Sequence[AttackParts], rounds: Rounds | None
) -> tuple[ProbeResult, Bools, int]:
    """Fill the table of verdicts. Return the probes, the evaluated examples (N,) and the number of rounds."""
    probed = ProbeResult()
    steps = [np.ones(len(run.verdicts), dtype=bool)] if rounds is None else rounds.run(run.verdicts)
    for count, rows in enumerate(steps, 1):
        predict_natural(run, rows)
        if parts and count == 1:
            # The audit of fast includes a black-box attack with many more queries.
            probed = run_probes(run, black_box=not any(one.audits for one in parts))
        for one in parts:
            run_attack(run, one, rows, probed.warnings)
    for key, corruption in settings.corruptions.items():
        run_corruption(run, key, corruption, rows)
    return probed, rows, count


def _save(report: ClassReport, directory: RunDirectory, fingerprint: str) -> None:
    """Write the report and the verdicts on the evaluated examples."""
    assert report.verdicts is not None
    report.verdicts.save(directory.verdicts, fingerprint)
    report.to_json(directory.report)
    if report.examples is not None:
        write_json(directory.examples, report.examples.model_dump(mode="json", by_alias=True))
    report.to_html(directory.page)
    directory.finish("evaluation")


def _identity(model: nn.Module, sample: Sequence[Tensor]) -> list[Any]:
    """Return the identity of a model: its weights, some predictions and software versions, not its path or name."""
    predictions = np.concatenate([predict(model, x) for x in sample]).tolist()
    return [digest_model(model), predictions, versions()["classwise"], versions()["torch"]]


def _check_gradients(model: nn.Module, parts: Sequence[AttackParts]) -> None:
    """Refuse attacks that need gradients if the model has none."""
    units = [unit for one in parts for unit, attack in one.units.items() if not attack.black_box]
    if units and not has_gradients(model):
        black_boxes = ", ".join(name for name, attack in ATTACKS.items() if attack.black_box)
        raise InputError(f"{units[0]} needs gradients, but the model has no gradients: use {black_boxes}")


def _distinct(keys: list[str]) -> list[str]:
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"the attack {key!r} is given twice")
    return keys
