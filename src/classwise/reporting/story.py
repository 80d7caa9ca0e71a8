"""Reports in sentences. Nothing is claimed here that the intervals or the paired tests do not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from classwise.reporting import charts
from classwise.reporting.comparison import Comparison, Row
from classwise.reporting.effort import AuditInfo
from classwise.reporting.report import ClassReport, Worst
from classwise.storage.verdicts import NATURAL

LEVEL = 0.05
"""A change is called real where its (corrected) p-value lies below."""
ABSENT = "–"
NAMED = 4
"""Classes that a sentence names."""
NOTHING_MEASURED = "Nothing was measured: there are no examples."


def sentence(report: ClassReport) -> str:
    """The verdict on a model: its weakest class, the whole model, and the gap between best and worst class."""
    key = report.strongest
    result = report[key]
    worst, overall = result.worst, result.overall.value
    if worst is None or overall is None:
        return NOTHING_MEASURED
    attacked = key != NATURAL
    if overall == 0:
        return "Nothing survives: every example of every class was broken." if attacked else "Every example is wrong."
    weakest = _tied([part.value for part in result.by_class], worst)
    names = _names([report.dataset.classes[label] for label in weakest])
    one = len(weakest) == 1
    if attacked:
        says = f"{names} {'survives' if one else 'survive'} {percent(worst.value)} of attacks"
    else:
        says = f"{names} {'is' if one else 'are'} recognised {percent(worst.value)} of the time"
    if sum(part.n > 0 for part in result.by_class) == 1:
        verdict = f"{says}; no other class has examples."
    elif result.mcd == 0:
        verdict = f"{says}, like every other class."
    else:
        gap = f"the gap between its best and worst class is {number(result.mcd)} points"
        verdict = f"{says}, the whole model {percent(overall)}: {gap}."
    return verdict if attacked else f"{verdict} No attack ran."


WHOM = {
    "survivors": "all that was left",
    "nearest": "the nearest misses",
    "sample": "a sample",
    "doubtful": "all, if in doubt",
}
"""Whom a stage attacks, in words."""


def audit_sentence(audit: AuditInfo) -> str:
    """What the audit of a cascade saw, and what followed from it."""
    seen = (
        f"Audit: of {audit.left:,} examples that the cascade left, the whole ensemble broke {audit.broke} of the "
        f"{audit.nearest} nearest to being broken and {audit.broke_random} of {audit.random} drawn at random"
    )
    if audit.at_most is not None:
        seen += f", so that it would break at most {percent(audit.at_most)} of all (95%)"
    if audit.doubts:
        return f"{seen}. There is doubt ({listing(audit.doubts)}): the ensemble ran on everything that was left."
    return f"{seen}. Nothing speaks against the cascade: the ensemble did not run on the rest."


def allocation_sentence(report: ClassReport) -> str | None:
    """How the examples were shared out, where they were not all attacked."""
    found = report.allocation
    if found is None:
        return None
    width = (found.high - found.low) / 2
    some = [class_name(report.dataset.classes[label]) for label in found.contenders[:NAMED]]
    names = listing([*some, f"{len(found.contenders) - NAMED} more"] if len(found.contenders) > NAMED else some)
    who = f"it may be {names}" if len(found.contenders) > 1 else f"it is {names}"
    how = "reached" if found.reached else "not reached, for the classes that decide it have no more examples"
    return (
        f"Drawn until the worst class is known to {number(found.asked)} points: {how} (± {number(width)}; {who}). "
        f"{sum(found.attacked):,} of {sum(found.available):,} examples were attacked, in {found.rounds} "
        f"round{'s' if found.rounds > 1 else ''}. The overall accuracy is that of the first round, each class by its "
        "size; the values of classes that were soon left alone lean to the high side."
    )


def comparison_sentences(comparison: Comparison) -> list[str]:
    """Who is weak, what each model changes about it, at what cost, and whether the data can tell."""
    key = comparison.strongest
    baseline, *others = comparison[key]
    if baseline.worst is None:
        return [NOTHING_MEASURED]
    classes = comparison.dataset.classes
    sentences = [_weakness(baseline, classes, attacked=key != NATURAL)]
    sentences += [_against(row, baseline, classes) for row in others]
    if all(row.rho is None for row in others):
        zero = "average" if baseline.overall.value == 0 else "worst class"
        sentences.append(f"rho is undefined, because the {zero} of {baseline.model} is at 0.")
    warning = unpaired(comparison)
    if warning is not None:
        sentences.append(warning)
    return [*sentences, *_leaders([baseline, *others]), *_ranking(baseline, others)]


def unpaired(comparison: Comparison) -> str | None:
    """Which models could not be tested against the baseline; None where all could."""
    baseline, *others = comparison[comparison.strongest]
    untested = [row.model for row in others if row.change is None]
    if not untested:
        return None
    who = "The models" if len(untested) == len(others) else listing([*untested, baseline.model])
    return (
        f"{who} were not measured on the same examples (or the verdicts are not at hand), so no paired test was made."
    )


def _weakness(baseline: Row, classes: Sequence[str], *, attacked: bool) -> str:
    worst = baseline.worst
    assert worst is not None
    kept = "survive" if attacked else "are recognised"
    if baseline.overall.value == 0:
        return f"{baseline.model} holds nothing: no example of any class {'survives' if attacked else 'is recognised'}."
    weakest = _tied(baseline.shares, worst)
    names = _names([classes[label] for label in weakest])
    where = f"{names}, where" if len(weakest) == 1 else f"{names}, in each of which"
    share = f"{percent(worst.value)} ({interval(worst.low, worst.high)})"
    return (
        f"{baseline.model} is weakest at {where} {share} of the examples {kept}, "
        f"against {percent(baseline.overall.value)} over all classes."
    )


def _against(row: Row, baseline: Row, classes: Sequence[str]) -> str:
    parts = [_worst_change(row, baseline, classes), _average_change(row, baseline)]
    if row.rho is not None:
        parts.append(f"rho is {signed(row.rho, 2)}.")
    return " ".join([*parts, *_class_changes(row)])


def _class_changes(row: Row) -> list[str]:
    """The classes whose change the data show: what an average hides."""
    told = sorted((part for part in row.changes if part.p_value < LEVEL), key=lambda part: -abs(part.points))
    sides = []
    for word, side in (
        ("gains in", [part for part in told if part.points > 0]),
        ("losses in", [part for part in told if part.points < 0]),
    ):
        if side:
            shown = [f"{class_name(part.name)} ({signed(part.points)})" for part in side[:3]]
            more = [f"{len(side) - 3} more"] if len(side) > 3 else []
            sides.append(f"{word} {listing([*shown, *more])}")
    return [f"By class, the data show {' and '.join(sides)}."] if sides else []


def _worst_change(row: Row, baseline: Row, classes: Sequence[str]) -> str:
    before, after = baseline.worst, row.worst
    if before is None or after is None:
        return f"{row.model} has no examples to compare."
    weakest = _tied(baseline.shares, before)
    shared = sorted(set(weakest) & set(_tied(row.shares, after)))
    if shared:
        still = "still " if len(weakest) == 1 else ""
        return _same_class(row, before, after, shared[0], still + class_name(classes[shared[0]]))
    return _other_class(row, baseline, before, after)


def _same_class(row: Row, before: Worst, after: Worst, label: int, name: str) -> str:
    moved = f"from {percent(before.value)} to {percent(after.value)}"
    delta = after.value - before.value
    if delta == 0:
        return f"{row.model} leaves the worst class, {name}, at {percent(after.value)}."
    change = next((part for part in row.changes if part.label == label), None)
    if change is not None:
        told, why = change.p_value < LEVEL, f"{p_text(change.p_value)} on the same {change.n:,} examples"
    else:
        told = not _overlap(before, after)
        why = "the intervals do not overlap" if told else "the intervals overlap"
    if told:
        verb = "lifts" if delta > 0 else "lowers"
        return f"{row.model} {verb} the worst class, {name}, {moved}: {signed(delta)} points ({why})."
    return (
        f"{row.model} reads {signed(delta)} points in the worst class, {name} ({moved}), but the data cannot tell "
        f"this from no change ({why})."
    )


def _other_class(row: Row, baseline: Row, before: Worst, after: Worst) -> str:
    delta = after.value - before.value
    now = f"the weakest class is now {after.name} at {percent(after.value)} ({interval(after.low, after.high)})"
    then = row.shares[before.label]
    assert then is not None
    change = next((part for part in row.changes if part.label == before.label), None)
    path = f"from {percent(before.value)} to {percent(then)}"
    if change is None:
        moves = f"goes {path}"
    elif change.p_value < LEVEL:
        moves = f"{'rises' if change.points > 0 else 'falls'} {path} ({p_text(change.p_value)})"
    else:
        moves = (
            f"reads {percent(then)} after {percent(before.value)}, "
            f"which the data cannot tell from no change ({p_text(change.p_value)})"
        )
    opening = f"With {row.model}, {class_name(before.name)}, the weakest of {baseline.model}, {moves}, and {now}."
    if delta == 0:
        return f"{opening} The minimum stays where it was."
    if _overlap(before, after):
        return f"{opening} The minimum reads {signed(delta)} points, but the intervals overlap: the data cannot tell."
    verb = "rises" if delta > 0 else "falls"
    return f"{opening} So the minimum {verb} by {number(abs(delta))} points, and the intervals do not overlap."


def _average_change(row: Row, baseline: Row) -> str:
    assert row.overall.value is not None
    assert baseline.overall.value is not None
    delta = row.overall.value - baseline.overall.value
    if delta == 0:
        return f"The average stays at {percent(row.overall.value)}."
    if row.change is not None:
        told, why = row.change.p_value < LEVEL, p_text(row.change.p_value)
    else:
        told = not _meet(baseline.overall, row.overall)
        why = "the intervals do not overlap" if told else "the intervals overlap"
    path = f"from {percent(baseline.overall.value)} to {percent(row.overall.value)}"
    if not told:
        return f"The average reads {signed(delta)} points ({path}), which the data cannot tell from no change ({why})."
    if delta > 0:
        return f"The average gains {number(delta)} points ({path}; {why})."
    return f"The average loses {number(-delta)} points ({path}; {why})."


def _ranking(baseline: Row, others: Sequence[Row]) -> list[str]:
    """The best worst class and its runner-up, where neither is the baseline: that pair has no sentence yet."""
    if len(others) < 2:
        return []
    ranked = sorted(
        ((row.worst, row) for row in [baseline, *others] if row.worst is not None), key=lambda pair: -pair[0].value
    )
    if len(ranked) < 2 or baseline in (ranked[0][1], ranked[1][1]):
        return []
    (best, first), (next_best, second) = ranked[:2]
    opening = (
        f"The highest worst class is that of {first.model}, {percent(best.value)} ({interval(best.low, best.high)})"
    )
    follows = f"{second.model} follows with {percent(next_best.value)} ({interval(next_best.low, next_best.high)})"
    if _overlap(best, next_best):
        return [
            f"{opening}; {follows}. The intervals overlap, so this comparison cannot rank the two; "
            "with one of them as the baseline a paired test could."
        ]
    return [f"{opening}; {follows}, and the intervals do not overlap."]


def _leaders(rows: Sequence[Row]) -> list[str]:
    """Of three models and more, who reads highest on what; what can be told of pairs stands in the other sentences."""
    known = [(row.overall.value, row.worst.value, row) for row in rows if row.worst and row.overall.value is not None]
    if len(known) < 3:
        return []
    best = [front[2] for front in (max(known, key=lambda one: one[0]), max(known, key=lambda one: one[1]))]
    if best[0] is best[1]:
        return [f"{best[0].model} reads highest both on average and in its worst class."]
    kept = [known[number][2].model for number in charts.front([one[:2] for one in known])]
    between = [model for model in kept if model not in (best[0].model, best[1].model)]
    more = (
        f"; {listing(between)} {'lies' if len(between) == 1 else 'lie'} between, beaten by none in both"
        if between
        else ""
    )
    return [f"{best[0].model} reads highest on average, {best[1].model} in its worst class{more}."]


class _Bounds(Protocol):
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def _meet(one: _Bounds, other: _Bounds) -> bool:
    """Whether two intervals overlap; with a bound missing nothing can be told apart."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return True
    return one.low <= other.high and other.low <= one.high


def _overlap(one: Worst, other: Worst) -> bool:
    """Whether two worst classes could be equally weak, as measured or with the bias of a minimum removed."""
    return _meet(one, other) or _meet(one.corrected, other.corrected)


def _tied(values: Sequence[float | None], worst: Worst) -> list[int]:
    return [label for label, value in enumerate(values) if value == worst.value]


def _names(names: Sequence[str]) -> str:
    shown = [class_name(name) for name in names]
    if len(shown) > 3:
        return f"{shown[0]} and {len(shown) - 1} other classes"
    return listing(shown)


def class_name(name: str) -> str:
    """A class inside a sentence: bare numbers need the word.

    >>> class_name("cat"), class_name("8")
    ('cat', 'class 8')
    """
    return f"class {name}" if name.strip().isdigit() else name


def listing(parts: Sequence[str]) -> str:
    """Parts joined as in a sentence.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def number(value: float | None, digits: int = 1) -> str:
    """A number for reading; a dash where there is none.

    >>> number(1234.56), number(None), number(-0.01)
    ('1,234.6', '–', '0.0')
    """
    if value is None:
        return ABSENT
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0 turns −0.0 into 0.0


def percent(value: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return ABSENT if value is None else f"{number(value)}%"


def signed(value: float | None, digits: int = 1) -> str:
    """A difference with its sign.

    >>> signed(2.0), signed(-2.0), signed(0.0), signed(0.403, 2)
    ('+2.0', '−2.0', '0.0', '+0.40')
    """
    text = number(value, digits)
    return f"+{text}" if value is not None and round(value, digits) > 0 else text


def interval(low: float | None, high: float | None) -> str:
    """The bounds of an interval; nothing where there are none."""
    return "" if low is None or high is None else f"{number(low)}–{number(high)}"


def p_text(p_value: float) -> str:
    """A p-value for reading, never rounded across the level it is judged by.

    >>> p_text(0.0004), p_text(0.0123), p_text(0.0496), p_text(1.0)
    ('p < 0.001', 'p = 0.012', 'p = 0.0496', 'p = 1')
    """
    if p_value < 0.001:
        return "p < 0.001"
    if p_value == 1:
        return "p = 1"
    text = f"{p_value:.3f}"
    return f"p = {p_value:.4f}" if text == f"{LEVEL:.3f}" and p_value != LEVEL else f"p = {text}"
