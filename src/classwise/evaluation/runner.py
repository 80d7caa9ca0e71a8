"""Evaluate a model: from the model and images to verdicts and a report.

Natural predictions come first, then the probes of the trust checks, then each attack and each corruption
(``classwise.evaluation.stages``). Verdicts are reached by float32 forward passes of the model itself
(``classwise.evaluation.judge``) and saved every few seconds.
"""

# N examples

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import FoldedCopy, release_memory, search_model
from classwise.attacks import ATTACKS
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, has_gradients
from classwise.core.progress import Progress
from classwise.core.threat import Threat
from classwise.core.types import Attack
from classwise.corruptions import Corruption
from classwise.data import ImageSet, ordered
from classwise.data.derived import known_superclasses
from classwise.evaluation.adaptive import Rounds
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.effort import account
from classwise.evaluation.examples import find_broken_examples
from classwise.evaluation.inputs import SAMPLE, SAMPLE_BATCH, choose_examples, count_classes, default_batch_size
from classwise.evaluation.judge import predict
from classwise.evaluation.record import Record
from classwise.evaluation.stages import AttackParts, Run, predict_natural, run_attack, run_corruption
from classwise.evaluation.trust.checks import ProbeResult, run_probes
from classwise.evaluation.trust.findings import derive_findings
from classwise.metrics.comparison import Bools
from classwise.models.weights import digest_model
from classwise.reporting import ClassReport
from classwise.reporting.corruptions import CorruptionInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.files import digest_json, write_json
from classwise.storage.run_directory import RunDirectory, Section, hardware, versions
from classwise.storage.verdicts import WORST_CASE, Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Attacks and settings of an evaluation. With the model and the images they determine the verdicts."""

    attacks: Mapping[str, tuple[str, Attack]]
    """Spec and attack, by the key in the report."""
    corruptions: Mapping[str, Corruption]
    threat: Threat
    per_class: int | None
    """Number of examples of each class to evaluate, the first ones. None: all."""
    batch_size: int | None
    """None: derived from the image size."""
    seed: int
    engine: EngineName
    until_worst_ci: float | None
    """Stop once the worst class's 95% interval is within ± this many percentage points. None: attack all examples."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.batch_size}")
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
    try:
        record = Record(verdicts=pending)
        if directory is not None:
            named = {name: value for name, value in model_info.items() if name != "trained"}
            details = {"asked": {**recorded, "model": named}}
            record = Record.open(directory, pending, fingerprint, details, resume=resume, beside=beside)
        free = partial(release_memory, searched)
        run = Run(
            model=model,
            searched=searched,
            images=images,
            threat=settings.threat,
            seed=settings.seed,
            record=record,
            loop=BatchLoop(size=batch_size, progress=progress, save=record.save, free=free),
        )
        try:
            outcome = _run_stages(run, settings, parts, num_classes)
        finally:
            record.save()
        report = _report(run, settings, parts, outcome, classes, model_info, trained_on, command)
    finally:
        release_memory(searched)
    if directory is not None:
        _save(report, directory, fingerprint)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Results of the stages other than the verdicts."""

    probed: ProbeResult
    rows: Bools
    """(N,) examples that were evaluated."""
    rounds: Rounds | None
    """Adaptive evaluation only."""
    count: int
    """Number of rounds."""


def _run_stages(run: Run, settings: EvaluationSettings, parts: Sequence[AttackParts], num_classes: int) -> _Outcome:
    """Fill the table of verdicts."""
    label, goal = run.verdicts.label, settings.until_worst_ci
    rounds = None if goal is None else Rounds.of(label, num_classes, goal, settings.seed)
    probed = ProbeResult()
    steps = iter([np.ones(len(label), dtype=bool)]) if rounds is None else rounds.run(run.verdicts)
    for count, rows in enumerate(steps, 1):
        predict_natural(run, rows)
        if parts and count == 1:
            # The audit of fast includes a black-box attack with many more queries.
            probed = run_probes(run, black_box=not any(one.has_audit for one in parts))
        for one in parts:
            run_attack(run, one, rows, probed.warnings)
    for key, corruption in settings.corruptions.items():
        run_corruption(run, key, corruption, rows)
    return _Outcome(probed=probed, rows=rows, rounds=rounds, count=count)


def _report(
    run: Run,
    settings: EvaluationSettings,
    parts: Sequence[AttackParts],
    outcome: _Outcome,
    classes: list[str],
    model_info: dict[str, Any],
    trained_on: str | None,
    command: str | None,
) -> ClassReport:
    """Derive the report from the verdicts."""
    images, verdicts, rounds, rows = run.images, run.verdicts, outcome.rounds, outcome.rows
    audits = {one.key: one.cascade(verdicts, run.seed).audit(outcome.probed.warnings) for one in parts}
    attacks = {one.key: account(one, run.record, classes, audits[one.key]) for one in parts}
    decided = verdicts if rounds is None else verdicts.take(rows)
    report = ClassReport.from_verdicts(
        decided,
        dataset=DatasetInfo(
            name=images.name,
            split=images.split,
            n=len(decided),
            classes=classes,
            digest=images.digest(),
            superclasses=known_superclasses(images.name, len(classes)),
        ),
        model={
            **model_info,
            "searched": run.searched.how if isinstance(run.searched, FoldedCopy) else "as it is",
            "versions": versions(),
            "hardware": hardware(),
        },
        threat=ThreatInfo(norm=run.threat.norm, eps=run.threat.eps, eps_text=run.threat.text),
        attacks=attacks,
        corruptions=[
            CorruptionInfo(key=key, kind=corruption.kind, family=corruption.family, severity=corruption.severity)
            for key, corruption in settings.corruptions.items()
        ],
        sanity=derive_findings(
            decided,
            run.threat,
            rejected={key: info.rejected for key, info in attacks.items()},
            classes=classes,
            black_box={unit: attack.black_box for one in parts for unit, attack in one.units.items()},
            probes=outcome.probed.probes,
            probe_failure=outcome.probed.failure,
            reduced_batch_size=run.loop.size if run.loop.reduced else None,
            trained_on_images=trained_on is not None and trained_on == images.digest(),
        ),
        allocation=None if rounds is None else rounds.info(rows, outcome.count, verdicts),
        overall=None
        if rounds is None
        else {key: rounds.overall(verdicts, key) for key in (*verdicts.keys, WORST_CASE)},
        command=command,
    )
    if parts and report.worst is not None:
        with suppress(InputError, torch.OutOfMemoryError):  # the report is valid without images
            report.keep_examples(find_broken_examples(run, parts, report.worst.label, classes, rows))
    return report


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
