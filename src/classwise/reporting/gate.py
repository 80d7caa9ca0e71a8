"""Checks that pass or fail: limits on a report, paired tests against a baseline, and findings of trust checks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
from pydantic import computed_field

from classwise.core.errors import InputError, unknown
from classwise.metrics.intervals import gap_interval, variance_interval
from classwise.reporting.part import Part
from classwise.reporting.results import ComparisonData, ReportData
from classwise.reporting.sanity import SEVERITIES

PERCENT = 100.0
LARGEST_CV = 2500.0
"""The largest possible value: half of the classes at 0%, half at 100%; in percent²."""


class Check(Part):
    """One requirement and whether it is met."""

    passed: bool
    what: str
    measured: str
    wanted: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    """The measured value and its 95% interval in percent (CV: percent²); for a paired test the change in points."""
    p_value: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        """The requirement with the measured value, as one line."""
        return f"{self.what}: {self.measured} (required: {self.wanted})"


def thresholds(
    report: ReportData,
    key: str,
    *,
    min_worst: float | None = None,
    min_average: float | None = None,
    min_class: Sequence[str] = (),
    max_mcd: float | None = None,
    max_cv: float | None = None,
    confident: bool = False,
) -> list[Check]:
    """Check measured values against limits, in percent (CV: percent²). A value that was not measured fails.

    ``min_class`` holds limits such as ``cat=30``, by name or label.

    ``confident`` requires the limit to hold for the measured value and for the end of its 95% interval closer to the
    limit. The interval is Wilson's for a class and the average, selection-corrected for the worst class; for MCD and CV
    see ``gap_interval`` and ``variance_interval``. Limits are checked one by one: a limit that does not hold for the
    true value passes in about 2.5% of cases.
    """
    demands: list[tuple[str | int, float | None]] = [("worst", min_worst), ("average", min_average)]
    demands += [*_by_label(report, min_class), ("MCD", max_mcd), ("CV", max_cv)]
    return [_check(report, key, what, limit, confident) for what, limit in demands if limit is not None]


def no_worse_than(comparison: ComparisonData, key: str, alpha: float) -> list[Check]:
    """Check that no class, nor the average, of the last model is significantly worse than the baseline.

    Exact McNemar tests on the same examples, for the classes corrected by Holm. The tests are two-sided and only losses
    count, so two equal models fail with a probability of at most ``alpha / 2`` for the average, ``alpha / 2`` for any
    class, and ``alpha`` in total.
    """
    check_level(alpha)
    if not comparison.paired:
        raise InputError("a paired test needs runs with the same examples: evaluate both on the same data")
    if key not in comparison.results:
        both = ", ".join(comparison.results)
        raise InputError(f"the runs have no common result {key!r}: choose one of {both} with --attack")
    row = comparison[key][-1]
    assert row.change is not None
    return [
        Check(
            passed=not (change.lost > change.gained and change.p_value < alpha),
            what=f"{key}: {name}, change",
            measured=f"{change.points:+.2f} points (p = {change.p_value:.2g})",
            wanted=f"no loss at alpha = {alpha:g}",
            value=change.points,
            p_value=change.p_value,
        )
        for name, change in [("average", row.change), *((f"class {part.name}", part) for part in row.changes)]
    ]


def check_level(alpha: float) -> None:
    """Require a significance level between 0 and 1."""
    if not 0 < alpha < 1:
        raise InputError(f"alpha must be between 0 and 1, got {alpha:g}")


def no_findings(report: ReportData, severity: str) -> list[Check]:
    """Check that there is no trust finding of this severity or higher; each such finding is a failed check."""
    if severity not in SEVERITIES:
        raise unknown("severity", severity, SEVERITIES)
    wanted = f"no finding of severity {severity} or higher"
    found = report.sanity.at_least(severity)
    if not found:
        unprobed = "" if report.sanity.probes else " (trust checks did not run)"
        return [Check(passed=True, what="trust findings", measured=f"none{unprobed}", wanted=wanted)]
    return [
        Check(passed=False, what=f"trust finding: {one.severity}, {one.code}", measured=one.text, wanted=wanted)
        for one in found
    ]


def _check(report: ReportData, key: str, what: str | int, limit: float, confident: bool) -> Check:
    """Check one limit; an integer is the label of a class."""
    largest, unit = (LARGEST_CV, "a variance in percent²") if what == "CV" else (PERCENT, "a percentage")
    if not 0 <= limit <= largest:
        raise InputError(f"a limit must be {unit} from 0 to {largest:g}, got {limit}")
    name, value, low, high = _measured(report, key, what)
    at_most = what in ("MCD", "CV")
    bound = high if at_most else low
    if confident and value is not None and bound is None:
        raise InputError(
            f"--confident needs an interval, which {name} does not have after --until-worst-ci: omit --confident"
        )
    decisive = [one for one in (value, bound if confident else None) if one is not None]
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return Check(
        passed=bool(decisive) and all(one <= limit if at_most else one >= limit for one in decisive),
        what=f"{key}: {name}",
        measured="not measured" if value is None else f"{value:.2f}{interval}",
        wanted=f"{'at most' if at_most else 'at least'} {limit:g}{' with 95% confidence' if confident else ''}",
        value=value,
        low=low,
        high=high,
    )


def _measured(report: ReportData, key: str, what: str | int) -> tuple[str, float | None, float | None, float | None]:
    """Return the name of a quantity, its value and its interval."""
    result = report[key]
    worst, overall = result.worst, result.overall
    if what == "worst":
        if worst is None:
            return "worst class", None, None, None
        return f"worst class {worst.name}", worst.value, worst.corrected.low, worst.corrected.high
    if what == "average":
        return "average", overall.value, overall.low, overall.high
    drawn = report.allocation is None  # after adaptive evaluation the values of single classes are biased
    if isinstance(what, int):
        part = result.by_class[what]
        return f"class {part.name}", part.value, part.low if drawn else None, part.high if drawn else None
    confusion = np.array(report.confusion[key], dtype=np.int64)
    value, scale, bounds = (
        (result.mcd, PERCENT, gap_interval) if what == "MCD" else (result.cv, PERCENT**2, variance_interval)
    )
    found = bounds(confusion.diagonal(), confusion.sum(axis=1)) if drawn else None
    low, high = (None, None) if found is None else (scale * found[0], scale * found[1])
    return str(what), value, low, high


def _by_label(report: ReportData, demands: Sequence[str]) -> list[tuple[int, float]]:
    """Return labels and limits from texts such as ``cat=30``. A name takes precedence over an equal label."""
    classes = report.dataset.classes
    found: list[tuple[int, float]] = []
    for demand in demands:
        name, equals, text = demand.rpartition("=")
        try:
            limit = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"a limit for a class must be name=percent, such as cat=30, got {demand!r}")
        labels = [label for label, known in enumerate(classes) if known == name]
        if not labels and name.isdecimal() and int(name) < len(classes):
            labels = [int(name)]
        if len(labels) > 1:
            raise InputError(f"{len(labels)} classes are named {name!r}: use one of the labels {labels}")
        if not labels:
            close = difflib.get_close_matches(name, classes, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InputError(f"unknown class {name!r}: {hint}expected a name or a label from 0 to {len(classes) - 1}")
        if labels[0] in dict(found):
            raise InputError(f"class {name} is given twice: pass one limit for each class")
        found.append((labels[0], limit))
    return found
