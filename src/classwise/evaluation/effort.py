"""Account for the effort of an attack, in total, by class and by stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from classwise.evaluation.record import Record
from classwise.evaluation.stages import AttackParts
from classwise.reporting.effort import AttackInfo, AuditInfo, ClassEffort, StageInfo
from classwise.storage.verdicts import NATURAL


def account(parts: AttackParts, record: Record, classes: Sequence[str], audit: AuditInfo | None) -> AttackInfo:
    """Return the settings and the effort of an attack."""
    verdicts, effort, units = record.verdicts, record.effort, list(parts.units)
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
        audit=audit,
    )
