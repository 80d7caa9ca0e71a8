"""The test evaluation of a repair: the original and the repaired model under a fresh attack."""

# N examples, K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import Progress
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.inputs import default_batch_size
from classwise.evaluation.judge import compute_logits
from classwise.evaluation.runner import EvaluationSettings, run_evaluation
from classwise.metrics import confusion_matrix
from classwise.metrics.calibration import expected_calibration_error
from classwise.metrics.counts import Ints
from classwise.reporting import ClassReport, compare
from classwise.reporting.comparison import Row
from classwise.reporting.estimates import ClassEstimate, Estimate
from classwise.reporting.repair import ClassOutcome, OnTest
from classwise.storage.verdicts import NATURAL, Verdicts

MOST_LISTED = 50
"""Maximum number of classes for which the change in errors is reported for every pair."""
_ALARMING = ("warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """The report of one of the two models, and its natural logits (N, K) on the same images."""

    report: ClassReport
    logits: NDArray[np.float32]

    @property
    def verdicts(self) -> Verdicts:
        """The verdicts behind the report."""
        assert self.report.verdicts is not None
        return self.report.verdicts


def evaluate_on_test(
    model: nn.Module, images: ImageSet, settings: EvaluationSettings, *, progress: Progress, **options: Any
) -> ModelResult:
    """Evaluate one model, with further ``options`` of ``run_evaluation``, and compute its natural logits."""
    report = run_evaluation(model, images, settings, progress=progress, **options)
    assert report.verdicts is not None
    index, device = report.verdicts.index, device_of(model)
    logits = np.empty((len(index), len(report.dataset.classes)), dtype=np.float32)

    def fill(batch: Ints) -> None:
        x = next(ordered(images, index[batch], len(batch), device))[0]
        logits[batch] = compute_logits(model, x).float().cpu().numpy()

    size = settings.batch_size or default_batch_size(images, device)
    BatchLoop(size=size, progress=progress).run("logits", np.ones(len(index), dtype=bool), fill)
    return ModelResult(report=report, logits=logits)


def compare_on_test(before: ModelResult, after: ModelResult) -> OnTest:
    """Compare the models before and after a repair, class by class, with paired tests."""
    comparison = compare(before.report, after.report, names=["before", "after"])
    key = comparison.strongest
    first, second = comparison[key]
    natural_first, natural_second = comparison[NATURAL]
    if first.worst is None or second.worst is None:
        raise InputError("there are no test images: the repair cannot be evaluated")
    changes = {part.label: part for part in second.changes}
    findings = after.report.sanity.findings
    return OnTest(
        data=f"{comparison.dataset.name}/{comparison.dataset.split}",
        attack=key if key == NATURAL or len(before.report.attacks) != 1 else next(iter(before.report.attacks)),
        average_before=first.overall,
        average_after=second.overall,
        average_change=_less(second.overall, first.overall),
        average_p=None if second.change is None else second.change.p_value,
        worst_before=_worst(first),
        worst_after=_worst(second),
        worst_before_corrected=first.worst.corrected,
        worst_after_corrected=second.worst.corrected,
        rho=second.rho,
        natural_before=natural_first.overall,
        natural_after=natural_second.overall,
        natural_worst_before=None if natural_first.worst is None else natural_first.worst.value,
        natural_worst_after=None if natural_second.worst is None else natural_second.worst.value,
        ece_before=_ece(before, None),
        ece_after=_ece(after, None),
        corrupted_before=_corrupted(before, None),
        corrupted_after=_corrupted(after, None),
        by_class=[
            ClassOutcome(
                label=label,
                name=name,
                natural_before=_plain(natural_first.by_class[label]),
                natural_after=_plain(natural_second.by_class[label]),
                robust_before=_plain(first.by_class[label]),
                robust_after=_plain(second.by_class[label]),
                change=_less(second.by_class[label], first.by_class[label]),
                p_value=changes[label].p_value if label in changes else None,
                ece_before=_ece(before, label),
                ece_after=_ece(after, label),
                corrupted_before=_corrupted(before, label),
                corrupted_after=_corrupted(after, label),
            )
            for label, name in enumerate(comparison.dataset.classes)
        ],
        errors_removed=_errors_removed(before.verdicts, after.verdicts, key, len(comparison.dataset.classes)),
        findings=[f"{one.severity}: {one.text}" for one in findings if one.severity in _ALARMING],
    )


def _errors_removed(before: Verdicts, after: Verdicts, key: str, num_classes: int) -> list[list[int]]:
    """Return the decrease in the number of images of each class (row) that are predicted as another (column)."""
    if num_classes > MOST_LISTED:
        return []
    first, second = (
        confusion_matrix(one.label, one.predictions(key), num_classes).astype(np.int64) for one in (before, after)
    )
    change = first - second
    np.fill_diagonal(change, 0)
    found: list[list[int]] = change.tolist()
    return found


def _worst(row: Row) -> ClassEstimate:
    assert row.worst is not None
    return row.by_class[row.worst.label]


def _plain(part: ClassEstimate) -> Estimate:
    return Estimate(value=part.value, low=part.low, high=part.high, n=part.n)


def _less(after: Estimate, before: Estimate) -> float:
    return round((after.value or 0.0) - (before.value or 0.0), 4)


def _rows(verdicts: Verdicts, label: int | None) -> NDArray[np.bool_]:
    return np.ones(len(verdicts), dtype=bool) if label is None else np.asarray(verdicts.label == label)


def _ece(one: ModelResult, label: int | None) -> float | None:
    """The calibration error on natural images, in percent."""
    rows = _rows(one.verdicts, label)
    if not rows.any():
        return None
    logits = one.logits[rows].astype(np.float64)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = 1 / shares.sum(axis=1)
    right = logits.argmax(axis=1) == one.verdicts.label[rows]
    return round(100 * expected_calibration_error(confidence, right), 4)


def _corrupted(one: ModelResult, label: int | None) -> float | None:
    """The mean accuracy over all corruptions, in percent."""
    rows = _rows(one.verdicts, label)
    columns: Mapping[str, Any] = one.verdicts.corrupted
    if not columns or not rows.any():
        return None
    right = [float((column[rows] == one.verdicts.label[rows]).mean()) for column in columns.values()]
    return round(100 * float(np.mean(right)), 4)
