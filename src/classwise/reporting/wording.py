"""The verdict on a report or a comparison in one sentence, and the facts beside it."""

from __future__ import annotations

from collections.abc import Sequence

from classwise.reporting.charts import front
from classwise.reporting.effort import AuditInfo
from classwise.reporting.estimates import Interval
from classwise.reporting.formatting import SIGNIFICANT, class_name, interval, listing, number, p_text, percent, signed
from classwise.reporting.results import ClassChange, ComparisonData, ReportData, Row, Worst
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
    key = report.strongest
    result = report[key]
    worst, overall = result.worst, result.overall.value
    if worst is None or overall is None:
        return NOTHING_MEASURED
    attacked = key != NATURAL
    stay, end = ("stay correct under attack", "") if attacked else ("are classified correctly", " No attack ran.")
    if overall == 0:
        return f"No image of any class {'stays correct under attack' if attacked else 'is classified correctly'}.{end}"
    labels = _lowest([part.value for part in result.by_class], worst)
    share = f"{percent(worst.value)} ({interval(worst.low, worst.high)})"
    if result.mcd == 0 and sum(part.n > 0 for part in result.by_class) > 1:
        return f"All classes are equal: {share} of the images of each {stay}.{end}"
    names = _some([report.dataset.classes[label] for label in labels])
    possessive = "its" if len(labels) == 1 else "their"
    start = f"Weakest {'class' if len(labels) == 1 else 'classes'}: {names}. {share} of {possessive} images {stay}"
    if sum(part.n > 0 for part in result.by_class) == 1:
        return f"{start}; no other class has examples.{end}"
    return f"{start}, {percent(overall)} of all images; the best class is {number(result.mcd)} points higher.{end}"


def comparison_verdict(comparison: ComparisonData) -> str:
    """Return how the model with the highest worst class changes the baseline's worst class, with the test."""
    baseline, *others = comparison[comparison.strongest]
    known = [row for row in others if row.worst is not None]
    if baseline.worst is None or not known:
        return NOTHING_MEASURED
    best = max(known, key=lambda row: row.worst.value if row.worst else 0.0)
    assert best.worst is not None
    delta = best.worst.value - baseline.worst.value
    significant, why = _worst_test(baseline, best)
    path = f"from {_at(baseline)} to {_at(best)}"
    of = f" of {baseline.model}"
    if delta == 0:
        return f"{best.model} does not change the worst class{of}: {percent(best.worst.value)} ({_classes(best)})."
    if not significant:
        return (
            f"{best.model} does not change the worst class{of} significantly: {path}, {signed(delta)} points ({why})."
        )
    verb = "raises" if delta > 0 else "lowers"
    return f"{best.model} {verb} the worst class{of} {path}: {signed(delta)} points ({why})."


def comparison_facts(comparison: ComparisonData) -> list[tuple[str, str]]:
    """Return labeled facts: what each model changes, the Pareto front, and what could not be computed or tested."""
    baseline, *others = rows = comparison[comparison.strongest]
    if baseline.worst is None:
        return []
    facts = [(row.model, _changes(baseline, row)) for row in others]
    known = [(row.overall.value, row.worst.value, row) for row in rows if row.worst and row.overall.value is not None]
    if len(known) > 2:
        kept = front([one[:2] for one in known])
        facts.append(("Pareto front of average and worst class", listing([known[place][2].model for place in kept])))
        facts += _runner_up(sorted((one[2] for one in known), key=lambda row: -(row.worst.value if row.worst else 0)))
    if all(row.rho is None for row in others):
        zero = "average" if baseline.overall.value == 0 else "worst class"
        facts.append(("rho", f"undefined, because the {zero} of {baseline.model} is 0"))
    warning = unpaired(comparison)
    return [*facts, *([("Paired tests", warning)] if warning else [])]


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
    width = (found.high - found.low) / 2
    some = [class_name(report.dataset.classes[label]) for label in found.contenders[:NAMED]]
    names = listing([*some, f"{len(found.contenders) - NAMED} more"] if len(found.contenders) > NAMED else some)
    classes = f"candidates: {names}" if len(found.contenders) > 1 else f"worst class: {names}"
    how = "reached" if found.reached else "not reached, because the candidate classes have no more examples"
    return (
        f"Target: 95% interval of the worst class within ±{number(found.asked)} points; {how} "
        f"(±{number(width)}; {classes}). {sum(found.attacked):,} of {sum(found.available):,} examples were attacked in "
        f"{found.rounds} round{'s' if found.rounds > 1 else ''}. The overall accuracy is estimated from the first "
        "round, classes weighted by size; values of classes with few attacked examples are biased upward."
    )


def _changes(baseline: Row, row: Row) -> str:
    if row.worst is None or baseline.worst is None:
        return "no examples"
    _, why = _worst_test(baseline, row)
    parts = [f"worst class {signed(row.worst.value - baseline.worst.value)} points to {_at(row)} ({why})"]
    if (change := _own_change(baseline, row)) is not None and not _shared(baseline, row):
        parts.append(f"{class_name(change.name)} {signed(change.points)} ({p_text(change.p_value)})")
    delta = (row.overall.value or 0.0) - (baseline.overall.value or 0.0)
    test = (
        p_text(row.change.p_value)
        if row.change
        else _overlap_text(not _intervals_overlap(baseline.overall, row.overall))
    )
    parts.append(f"average {signed(delta)} to {percent(row.overall.value)} ({test})")
    if row.rho is not None:
        parts.append(f"rho {signed(row.rho, 2)}")
    found = sorted((part for part in row.changes if part.p_value < SIGNIFICANT), key=lambda part: -abs(part.points))
    for what, side in (
        ("significant gains", [part for part in found if part.points > 0]),
        ("significant losses", [part for part in found if part.points < 0]),
    ):
        if side:
            more = [f"{len(side) - 3} more"] if len(side) > 3 else []
            parts.append(f"{what}: {listing([*(f'{class_name(p.name)} {signed(p.points)}' for p in side[:3]), *more])}")
    return "; ".join(parts)


def _runner_up(rows: Sequence[Row]) -> list[tuple[str, str]]:
    first, second = rows[:2]
    assert first.worst is not None
    assert second.worst is not None
    overlap = _overlap_text(not _worst_classes_overlap(first.worst, second.worst))
    return [("Highest worst class", f"{first.model} {_at(first)}, then {second.model} {_at(second)}; {overlap}")]


def _worst_test(baseline: Row, row: Row) -> tuple[bool, str]:
    """Whether the worst class differs significantly, and how that was tested: paired if it is the same class."""
    change, before, after = _own_change(baseline, row), baseline.worst, row.worst
    assert before is not None
    assert after is not None
    if change is not None and _shared(baseline, row):
        return change.p_value < SIGNIFICANT, f"{p_text(change.p_value)}, n = {change.n:,}"
    separate = not _worst_classes_overlap(before, after)
    return separate, _overlap_text(separate)


def _own_change(baseline: Row, row: Row) -> ClassChange | None:
    """The change of a class that is the weakest of both, else of the baseline's weakest."""
    assert baseline.worst is not None
    label = min(_shared(baseline, row), default=baseline.worst.label)
    return next((part for part in row.changes if part.label == label), None)


def _shared(baseline: Row, row: Row) -> set[int]:
    assert baseline.worst is not None
    assert row.worst is not None
    return set(_lowest(baseline.shares, baseline.worst)) & set(_lowest(row.shares, row.worst))


def _at(row: Row) -> str:
    assert row.worst is not None
    return f"{percent(row.worst.value)} ({_classes(row)})"


def _classes(row: Row) -> str:
    assert row.worst is not None
    return _names([row.by_class[label].name for label in _lowest(row.shares, row.worst)])


def _overlap_text(separate: bool) -> str:
    return "intervals do not overlap" if separate else "intervals overlap"


def _intervals_overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals overlap; with a bound missing, they do."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return True
    return one.low <= other.high and other.low <= one.high


def _worst_classes_overlap(one: Worst, other: Worst) -> bool:
    """Whether two worst classes could be equal, as measured or selection-corrected."""
    return _intervals_overlap(one, other) or _intervals_overlap(one.corrected, other.corrected)


def _lowest(values: Sequence[float | None], worst: Worst) -> list[int]:
    return [label for label, value in enumerate(values) if value == worst.value]


def _names(names: Sequence[str]) -> str:
    return _some([class_name(name) for name in names])


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} other classes" if len(names) > 3 else listing(names)
