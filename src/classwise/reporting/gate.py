"""Checks that pass or fail: limits on a report, paired tests against a baseline, and findings of trust checks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from pydantic import computed_field

from classwise.core.errors import InputError, unknown
from classwise.metrics.counts import Ints
from classwise.metrics.intervals import gap_interval, variance_interval
from classwise.reporting.part import Part
from classwise.reporting.results import ComparisonData, ReportData
from classwise.reporting.sanity import SEVERITIES

PERCENT = 100.0
LARGEST_CV = 2500.0
"""The largest possible value: half of the classes at 0%, half at 100%; in percent²."""

Bound = Literal["at least", "at most"]


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
    demands: list[tuple[_Measure, Bound, float | None, float]] = [
        (_worst, "at least", min_worst, PERCENT),
        (_average, "at least", min_average, PERCENT),
        *((partial(_class, label=label), "at least", limit, PERCENT) for label, limit in _named(report, min_class)),
        (_mcd, "at most", max_mcd, PERCENT),
        (_cv, "at most", max_cv, LARGEST_CV),
    ]
    checks = []
    for measure, sense, limit, largest in demands:
        if limit is None:
            continue
        if not 0 <= limit <= largest:
            kind = "a percentage" if largest == PERCENT else "a variance in percent²"
            raise InputError(f"a limit must be {kind} from 0 to {largest:g}, got {limit}")
        checks.append(_judged(key, measure(report, key), sense, limit, confident))
    return checks


def no_worse_than(comparison: ComparisonData, key: str, alpha: float) -> list[Check]:
    """Check that no class, nor the average, of the last model is significantly worse than the baseline.

    Exact McNemar tests on the same examples, for the classes corrected by Holm. The tests are two-sided and only losses
    count, so two equal models fail with a probability of at most ``alpha / 2`` for the average, ``alpha / 2`` for any
    class, and ``alpha`` in total.
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha must be between 0 and 1, got {alpha}")
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


class _Measured(NamedTuple):
    what: str
    value: float | None
    low: float | None = None
    high: float | None = None


_Measure = Callable[[ReportData, str], _Measured]


def _worst(report: ReportData, key: str) -> _Measured:
    worst = report[key].worst
    if worst is None:
        return _Measured("worst class", None)
    return _Measured(f"worst class {worst.name}", worst.value, worst.corrected.low, worst.corrected.high)


def _average(report: ReportData, key: str) -> _Measured:
    overall = report[key].overall
    return _Measured("average", overall.value, overall.low, overall.high)


def _class(report: ReportData, key: str, label: int) -> _Measured:
    part = report[key].by_class[label]
    bounds = (part.low, part.high) if _all_drawn(report) else ()
    return _Measured(f"class {part.name}", part.value, *bounds)


def _mcd(report: ReportData, key: str) -> _Measured:
    bounds = gap_interval(*_counts(report, key)) if _all_drawn(report) else None
    return _Measured("MCD", report[key].mcd, *(PERCENT * bound for bound in bounds or ()))


def _cv(report: ReportData, key: str) -> _Measured:
    bounds = variance_interval(*_counts(report, key)) if _all_drawn(report) else None
    return _Measured("CV", report[key].cv, *(PERCENT**2 * bound for bound in bounds or ()))


def _all_drawn(report: ReportData) -> bool:
    """Whether all examples were attacked; after adaptive evaluation the values of single classes are biased."""
    return report.allocation is None


def _counts(report: ReportData, key: str) -> tuple[Ints, Ints]:
    confusion = np.array(report.confusion[key], dtype=np.int64)
    return confusion.diagonal(), confusion.sum(axis=1)


def _judged(key: str, part: _Measured, sense: Bound, limit: float, confident: bool) -> Check:
    what, value, low, high = part
    bound = low if sense == "at least" else high
    if confident and value is not None and bound is None:
        raise InputError(
            f"--confident needs an interval, which {what} does not have after --until-worst-ci: omit --confident"
        )
    decisive = [one for one in (value, bound if confident else value) if one is not None]
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return Check(
        passed=bool(decisive) and all(one >= limit if sense == "at least" else one <= limit for one in decisive),
        what=f"{key}: {what}",
        measured="not measured" if value is None else f"{value:.2f}{interval}",
        wanted=f"{sense} {limit:g}{' with 95% confidence' if confident else ''}",
        value=value,
        low=low,
        high=high,
    )


def _named(report: ReportData, demands: Sequence[str]) -> list[tuple[int, float]]:
    """Return labels and limits from texts such as ``cat=30``. A name takes precedence over an equal label."""
    classes = report.dataset.classes
    found = []
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
        found.append((labels[0], limit))
    return found
