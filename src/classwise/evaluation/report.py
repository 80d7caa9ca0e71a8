"""The report of an evaluation: results, effort of the attacks, findings and examples, derived from the verdicts."""

# N examples

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from classwise.accelerate import FoldedCopy
from classwise.core.errors import InputError
from classwise.corruptions import Corruption
from classwise.data.derived import known_superclasses
from classwise.evaluation.examples import find_broken_examples
from classwise.evaluation.parts import AttackParts
from classwise.evaluation.stages import Run
from classwise.evaluation.trust.findings import derive_findings
from classwise.evaluation.trust.probes import ProbeResult
from classwise.metrics.comparison import Bools
from classwise.reporting import ClassReport
from classwise.reporting.corruptions import CorruptionInfo
from classwise.reporting.effort import AttackInfo, ClassEffort, StageInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.run_directory import hardware, versions
from classwise.storage.verdicts import NATURAL


def make_report(
    run: Run,
    parts: Sequence[AttackParts],
    corruptions: Mapping[str, Corruption],
    probed: ProbeResult,
    rows: Bools,
    classes: list[str],
    *,
    model_info: dict[str, Any],
    trained_on: str | None,
    command: str | None,
    **adaptive: Any,
) -> ClassReport:
    """Derive the report from the verdicts on the evaluated examples ``rows`` (N,).

    ``adaptive`` are the results of ``Rounds``, for an adaptive evaluation.
    """
    images = run.images
    attacks = {one.key: _account(run, one, classes, probed.warnings) for one in parts}
    decided = run.verdicts.take(rows)
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
            for key, corruption in corruptions.items()
        ],
        sanity=derive_findings(
            decided,
            run.threat,
            rejected={key: info.rejected for key, info in attacks.items()},
            classes=classes,
            black_box={unit: attack.black_box for one in parts for unit, attack in one.units.items()},
            probes=probed.probes,
            probe_failure=probed.failure,
            reduced_batch_size=run.loop.size if run.loop.reduced else None,
            trained_on_images=trained_on is not None and trained_on == images.digest(),
        ),
        command=command,
        **adaptive,
    )
    if parts and report.worst is not None:
        with suppress(InputError, torch.OutOfMemoryError):  # the report is valid without images
            report.keep_examples(find_broken_examples(run, parts, report.worst.label, classes, rows))
    return report


def _account(run: Run, parts: AttackParts, classes: Sequence[str], warnings: Sequence[str]) -> AttackInfo:
    """Return the settings and the effort of an attack, in total, by class and by stage."""
    verdicts, effort, units = run.verdicts, run.effort, list(parts.units)
    attacked = verdicts.survived(NATURAL)
    passes = {
        "forwards": np.sum([verdicts.forwards[unit] for unit in units], axis=0),
        "backwards": np.sum([verdicts.backwards[unit] for unit in units], axis=0),
    }
    survivors = [int(verdicts.survived(name).sum()) for name in (NATURAL, *parts.stages)]
    return AttackInfo(
        spec=parts.spec,
        settings=repr(parts.attack),
        attacked=int(attacked.sum()),
        rejected=sum(effort[unit]["rejected"] for unit in units),
        seconds=round(sum(effort[unit]["seconds"] for unit in units), 3),
        **{name: int(counts.sum()) for name, counts in passes.items()},
        by_class=[
            ClassEffort(
                label=label,
                name=name,
                attacked=int((attacked & (verdicts.label == label)).sum()),
                **{which: int(counts[verdicts.label == label].sum()) for which, counts in passes.items()},
            )
            for label, name in enumerate(classes)
        ],
        stages=[
            StageInfo(
                name=name.removeprefix(f"{parts.key}/"),
                settings=repr(stage),
                whom=parts.selects[name],
                broke=survivors[number] - survivors[number + 1],
                forwards=int(verdicts.forwards[name].sum()),
                backwards=int(verdicts.backwards[name].sum()),
                **effort[name],
            )
            for number, (name, stage) in enumerate(parts.stages.items())
        ],
        strongest=parts.strongest(verdicts) if parts.variants else None,
        audit=parts.audit(verdicts, run.seed, warnings),
    )
