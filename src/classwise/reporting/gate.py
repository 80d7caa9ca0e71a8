"""Pass or fail: thresholds on a report, a paired test that no class got worse, and findings on its soundness."""

from __future__ import annotations

from classwise.errors import InputError, unknown
from classwise.reporting.comparison import Comparison
from classwise.reporting.part import Part
from classwise.reporting.report import ClassReport
from classwise.reporting.sanity import SEVERITIES


class Check(Part):
    """One demand and whether it holds."""

    passed: bool
    text: str


def thresholds(
    report: ClassReport,
    key: str,
    *,
    min_worst: float | None = None,
    min_average: float | None = None,
    max_mcd: float | None = None,
) -> list[Check]:
    """Measured values against limits, in percent. A value that could not be measured fails."""
    result = report[key]
    for limit in (min_worst, min_average, max_mcd):
        if limit is not None and not 0 <= limit <= 100:
            raise InputError(f"a limit is a percentage from 0 to 100, got {limit}")
    checks = []
    if min_worst is not None:
        worst = result.worst
        name, value = (worst.name, worst.value) if worst else ("none", None)
        checks.append(_limit(f"{key}: worst class {name}", value, at_least=min_worst))
    if min_average is not None:
        checks.append(_limit(f"{key}: average", result.overall.value, at_least=min_average))
    if max_mcd is not None:
        checks.append(_limit(f"{key}: gap between classes", result.mcd, at_most=max_mcd))
    return checks


def no_worse_than(comparison: Comparison, key: str, alpha: float) -> list[Check]:
    """No class, nor the average, of the last model lies significantly below the baseline's.

    The exact McNemar test on the same examples, for the classes corrected by Holm, at error rate ``alpha`` each.
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1, got {alpha}")
    if not comparison.paired:
        raise InputError("the two runs were not measured on the same examples: no paired test is possible")
    row = comparison[key][-1]
    assert row.change is not None
    checks = []
    for name, change in [("average", row.change), *((f"class {part.name}", part) for part in row.changes)]:
        worse = change.lost > change.gained and change.p_value < alpha
        text = f"{key}: {name} {change.points:+.1f} points against the baseline (p = {change.p_value:.2g})"
        checks.append(Check(passed=not worse, text=text))
    return checks


def no_findings(report: ClassReport, severity: str) -> list[Check]:
    """Nothing as grave as this, or graver, speaks against the evaluation itself: one failure for each that does."""
    if severity not in SEVERITIES:
        raise unknown("severity", severity, SEVERITIES)
    found = report.sanity.at_least(severity)
    if not found:
        unprobed = "" if report.sanity.probes else " (no probes were made)"
        return [Check(passed=True, text=f"sanity: no finding of severity {severity} or graver{unprobed}")]
    return [Check(passed=False, text=f"sanity: {one.severity}, {one.code}: {one.text}") for one in found]


def _limit(what: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None) -> Check:
    sign, limit = ("≥", at_least) if at_least is not None else ("≤", at_most)
    assert limit is not None
    if value is None:
        return Check(passed=False, text=f"{what} could not be measured (wanted {sign} {limit:g})")
    passed = value >= limit if at_least is not None else value <= limit
    return Check(passed=passed, text=f"{what} at {value:.2f} (wanted {sign} {limit:g})")
