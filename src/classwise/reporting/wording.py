"""The verdict on a report or a comparison in one sentence, and the caveats that its numbers need."""

from __future__ import annotations

from collections.abc import Sequence

from classwise.reporting.effort import AuditInfo
from classwise.reporting.formatting import SIGNIFICANT, class_name, interval, listing, number, p_text, percent, signed
from classwise.reporting.results import ComparisonData, ReportData, Result, Row
from classwise.storage.verdicts import NATURAL

NAMED = 4
"""Maximum number of classes that a sentence names."""
NOTHING_MEASURED = "There are no examples."
SELECTED = {
    "survivors": "all remaining",
    "nearest": "smallest margins",
    "sample": "a sample",
    "doubtful": "all, if the fallback is triggered",
}
"""Texts for the examples that a stage attacks."""


def report_verdict(report: ReportData) -> str:
    """Return the weakest class with its interval, the average, and the gap to the best class."""
    result, attacked = report[report.strongest], report.strongest != NATURAL
    worst, overall = result.worst, result.overall.value
    if worst is None:
        return NOTHING_MEASURED
    stay, end = ("stay correct under attack", "") if attacked else ("are classified correctly", " No attack ran.")
    if overall == 0:
        return f"No image of any class {'stays correct under attack' if attacked else 'is classified correctly'}.{end}"
    share = f"{percent(worst.value)} ({interval(worst.low, worst.high)})"
    several = sum(part.n > 0 for part in result.by_class) > 1
    if result.mcd == 0 and several:
        return f"All classes are equal: {share} of the images of each {stay}.{end}"
    names = _some([part.name for part in result.by_class if part.label in result.lowest])
    weakest, their = ("class", "its") if len(result.lowest) == 1 else ("classes", "their")
    start = f"Weakest {weakest}: {names}. {share} of {their} images {stay}"
    if not several:
        return f"{start}; no other class has examples.{end}"
    return f"{start}, {percent(overall)} of all images; the best class is {number(result.mcd)} points higher.{end}"


def comparison_verdict(comparison: ComparisonData) -> str:
    """Return how the model with the highest worst class changes the baseline's worst class, with the test."""
    baseline, *others = comparison[comparison.strongest]
    known = [(row.worst.value, row) for row in others if row.worst is not None]
    if baseline.worst is None or not known:
        return NOTHING_MEASURED
    value, best = max(known, key=lambda one: one[0])
    delta, (significant, test) = value - baseline.worst.value, _worst_test(baseline, best)
    of, path = f"the worst class of {baseline.model}", f"from {_at(baseline)} to {_at(best)}"
    change = f"{signed(delta)} points ({test})"
    if delta == 0:
        return f"{best.model} does not change {of}: {_at(best)}."
    if not significant:
        return f"{best.model} does not change {of} significantly: {path}, {change}."
    return f"{best.model} {'raises' if delta > 0 else 'lowers'} {of} {path}: {change}."


def comparison_facts(comparison: ComparisonData) -> list[tuple[str, str]]:
    """Return the test of the worst class of each model and its significant changes, and what was not tested."""
    baseline, *others = comparison[comparison.strongest]
    if baseline.worst is None:
        return []
    warning = unpaired(comparison)
    return [
        *((row.model, _changes(baseline, row)) for row in others),
        *([("Paired tests", warning)] if warning else []),
    ]


def unpaired(comparison: ComparisonData) -> str | None:
    """Return a sentence on the models that have no paired test against the baseline; None if all have one."""
    baseline, *others = comparison[comparison.strongest]
    untested = [row.model for row in others if row.change is None]
    if not untested:
        return None
    models = "The models" if len(untested) == len(others) else listing([*untested, baseline.model])
    return f"{models} were not measured on the same examples (or verdicts are missing): no paired test."


def audit_sentence(audit: AuditInfo) -> str:
    """Return what the audit of a cascade found and whether it triggered the fallback."""
    found = (
        f"Audit: of {audit.left:,} examples that survive the cascade, the full ensemble broke {audit.broke} of the "
        f"{audit.nearest} with the smallest margins and {audit.broke_random} of {audit.random} drawn at random"
    )
    if audit.at_most is not None:
        found += f" (95% upper bound: {percent(audit.at_most)} of all)"
    if audit.doubts:
        reasons = listing(audit.doubts)
        return f"{found}. Fallback triggered ({reasons}): the full ensemble ran on all surviving examples."
    return f"{found}. The fallback was not triggered."


def allocation_sentence(report: ReportData) -> str | None:
    """Return the outcome of adaptive evaluation; None if all examples were attacked."""
    found = report.allocation
    if found is None:
        return None
    some = [class_name(report.dataset.classes[label]) for label in found.contenders]
    if len(some) > NAMED:
        some[NAMED:] = [f"{len(some) - NAMED} more"]
    classes = f"{'candidates' if len(some) > 1 else 'worst class'}: {listing(some)}"
    how = (
        "reached"
        if found.reached
        else "not reached: with all examples of the candidate classes, the interval would be wider"
    )
    return (
        f"Target: 95% interval of the worst class within ±{number(found.asked)} points; {how} "
        f"(±{number((found.high - found.low) / 2)}; {classes}). {sum(found.attacked):,} of {sum(found.available):,} "
        f"examples were attacked in {found.rounds} round{'s' if found.rounds > 1 else ''}. The overall accuracy is "
        "estimated from the first round, classes weighted by size; values of classes with few attacked examples are "
        "biased upward."
    )


def _changes(baseline: Row, row: Row) -> str:
    if baseline.worst is None or row.worst is None:
        return "no examples"
    _, test = _worst_test(baseline, row)
    found = sorted((part for part in row.changes if part.p_value < SIGNIFICANT), key=lambda part: -abs(part.points))
    names = [f"{class_name(part.name)} {signed(part.points)}" for part in found[:NAMED]]
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    classes = f"; significant changes: {listing([*names, *more])}" if found else ""
    points = round(row.worst.value - baseline.worst.value, 1)
    change = f"unchanged at {_at(row)}" if points == 0 else f"{signed(points)} points, to {_at(row)}"
    return f"worst class {change} ({test}){classes}"


def _worst_test(baseline: Row, row: Row) -> tuple[bool, str]:
    """Whether the worst class differs significantly, and the test: paired if it is the same class, else intervals."""
    before, after = baseline.worst, row.worst
    assert before is not None
    assert after is not None
    same = set(baseline.lowest) & set(row.lowest)
    for change in row.changes:
        if change.label == min(same, default=None):
            return change.p_value < SIGNIFICANT, f"{p_text(change.p_value)}, n = {change.n:,}"
    pairs = ((before, after), (before.corrected, after.corrected))
    separate = all(one.high < other.low or other.high < one.low for one, other in pairs)
    return separate, "intervals do not overlap" if separate else "intervals overlap"


def _at(row: Result) -> str:
    assert row.worst is not None
    return f"{percent(row.worst.value)} ({_some([class_name(row.by_class[label].name) for label in row.lowest])})"


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} other classes" if len(names) > 3 else listing(names)
