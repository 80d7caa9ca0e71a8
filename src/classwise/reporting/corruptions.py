"""Accuracy on corrupted images: by kind, severity, family and class."""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from classwise.reporting.estimates import ClassEstimate, Estimate, estimate
from classwise.reporting.part import Part
from classwise.storage.verdicts import Verdicts


class CorruptionInfo(Part):
    """Which column of the verdicts holds which corruption."""

    key: str
    kind: str
    family: str
    severity: int


class CorruptionResult(Part):
    """What one corruption at one severity left of a model."""

    kind: str
    family: str
    severity: int
    overall: Estimate
    by_class: list[ClassEstimate]


class FamilyResult(Part):
    """The mean over the corruptions of a family. The interval takes images, not corrupted copies, as its sample."""

    family: str
    overall: Estimate
    by_class: list[ClassEstimate]


class Corruptions(Part):
    """Accuracy on corrupted images, which no attacker chose."""

    results: list[CorruptionResult]
    families: list[FamilyResult]

    @classmethod
    def from_verdicts(cls, verdicts: Verdicts, kinds: Sequence[CorruptionInfo], classes: list[str]) -> Corruptions:
        """Count each corruption, and average over the families."""

        def estimates(kept: Sequence[str]) -> dict[str, Any]:
            # Of each image, the share of its corrupted copies that kept their label. Its variance is at most that of
            # one copy, so that the interval for one copy an image is safe.
            share = np.mean([verdicts.corrupted[key] == verdicts.label for key in kept], axis=0)
            n = np.bincount(verdicts.label, minlength=len(classes))
            sums = np.bincount(verdicts.label, weights=share, minlength=len(classes))
            return {
                "overall": Estimate(**estimate(float(sums.sum()), int(n.sum()))),
                "by_class": [
                    ClassEstimate(label=label, name=name, **estimate(float(sums[label]), int(n[label])))
                    for label, name in enumerate(classes)
                ],
            }

        families = list(dict.fromkeys(info.family for info in kinds))
        return cls(
            results=[
                CorruptionResult(kind=info.kind, family=info.family, severity=info.severity, **estimates([info.key]))
                for info in kinds
            ],
            families=[
                FamilyResult(family=family, **estimates([info.key for info in kinds if info.family == family]))
                for family in families
            ],
        )
