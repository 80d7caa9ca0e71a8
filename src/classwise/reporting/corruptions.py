"""Accuracy on naturally corrupted images by kind, severity, family and class."""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from classwise.reporting.estimates import ClassEstimate, Estimate, class_estimates
from classwise.reporting.part import Part
from classwise.storage.verdicts import Verdicts


class CorruptionInfo(Part):
    """A corruption and its column in the verdicts."""

    key: str
    kind: str
    family: str
    severity: int


class CorruptionResult(Part):
    """Accuracy under one corruption at one severity."""

    kind: str
    family: str
    severity: int
    overall: Estimate
    by_class: list[ClassEstimate]


class FamilyResult(Part):
    """Mean accuracy over the corruptions of a family. The interval treats images, not copies, as the sample."""

    family: str
    overall: Estimate
    by_class: list[ClassEstimate]


class Corruptions(Part):
    """Accuracy under natural corruptions."""

    results: list[CorruptionResult]
    families: list[FamilyResult]

    @classmethod
    def from_verdicts(cls, verdicts: Verdicts, kinds: Sequence[CorruptionInfo], classes: list[str]) -> Corruptions:
        """Return the accuracy of each corruption and the mean of each family."""

        def estimates(kept: Sequence[str]) -> dict[str, Any]:
            # The share of an image's copies that are classified correctly varies at most as much as a single copy, so
            # the interval for one copy per image is conservative.
            share = np.mean([verdicts.corrupted[key] == verdicts.label for key in kept], axis=0)
            n = np.bincount(verdicts.label, minlength=len(classes))
            sums = np.bincount(verdicts.label, weights=share, minlength=len(classes))
            return class_estimates(sums.tolist(), n.tolist(), classes)

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
