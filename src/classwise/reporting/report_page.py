"""The page of one model, and its fragment for a notebook."""

# K classes

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from markupsafe import Markup

from classwise.reporting import charts, figures, story, trust
from classwise.reporting.estimates import ClassEstimate, Estimate
from classwise.reporting.rendering import marked, render
from classwise.reporting.report import ClassReport, Result
from classwise.storage.verdicts import NATURAL, WORST_CASE

MOST_CONFUSED = 5
MANY_CONFUSED = 20
"""Pairs that are told beside a matrix, and in its place where it has too many classes to be read."""


def report_page(report: ClassReport) -> str:
    """A whole document that opens without a network."""
    return render(
        "report.html",
        report=report,
        name=_model_name(report),
        verdict=story.sentence(report),
        panels=_panels(report),
        keys=list(report.results),
        marked={key: _worst_labels(result) for key, result in report.results.items()},
        many=len(report.dataset.classes) > charts.MANY_CLASSES,
        confusions=_confusions(report),
        broken=_broken(report),
        findings=trust.findings(report),
        probe_rows=trust.rows(report),
        probe_curves=trust.curves(report),
        model_facts=_facts({key: value for key, value in report.model.items() if key != "trained"}),
        trained_facts=_facts(report.model.get("trained", {})),
        costs={key: attack.by_class for key, attack in report.attacks.items() if attack.by_class},
        severities=_severities(report),
        corrupted=_corrupted(report),
        shown=_shown(report),
        texts=_texts(report),
    )


def report_fragment(report: ClassReport) -> str:
    """A small table with bars, styled inline, for a notebook."""
    key = report.strongest
    result, natural = report[key], report[NATURAL]
    chosen = charts.select([part.value for part in result.by_class])
    return render(
        "report_fragment.html",
        report=report,
        name=_model_name(report),
        key=key,
        result=result,
        verdict=story.sentence(report),
        rows=[
            (result.by_class[label], natural.by_class[label], label in _worst_labels(result))
            for label in [*chosen.weakest, *chosen.strongest]
        ],
        left_out=chosen.left_out,
    )


def _severities(report: ClassReport) -> list[int]:
    return sorted({part.severity for part in report.corruptions.results}) if report.corruptions else []


def _corrupted(report: ClassReport) -> list[tuple[str, str, list[Estimate | None]]]:
    """Family, kind, and what is left at every severity."""
    if report.corruptions is None:
        return []
    found = {(part.kind, part.severity): part.overall for part in report.corruptions.results}
    kinds = dict.fromkeys((part.family, part.kind) for part in report.corruptions.results)
    return [(family, kind, [found.get((kind, at)) for at in _severities(report)]) for family, kind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BarRow:
    """One class in the bars."""

    part: ClassEstimate
    natural: ClassEstimate
    attacked_bar: charts.Bar | None
    natural_bar: charts.Bar | None
    worst: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """What one position of the switch shows."""

    number: int
    key: str
    result: Result
    rows: list[_BarRow]
    strongest: list[_BarRow]
    left_out: int
    present: int
    tied: int
    """Classes that share the lowest value."""


def _panels(report: ClassReport) -> list[_Panel]:
    """One per attack, all of them together first; the natural result alone where no attack ran."""
    attacks = [key for key in report.results if key not in (NATURAL, WORST_CASE)]
    keys = [report.strongest, *attacks] if attacks else [report.strongest]
    return [_panel(number, key, report) for number, key in enumerate(keys)]


def _panel(number: int, key: str, report: ClassReport) -> _Panel:
    result, natural = report[key], report[NATURAL]
    worst = _worst_labels(result)

    def row(label: int) -> _BarRow:
        part, untouched = result.by_class[label], natural.by_class[label]
        return _BarRow(
            part=part,
            natural=untouched,
            attacked_bar=charts.bar(part.value, part.low, part.high),
            natural_bar=charts.bar(untouched.value, untouched.low, untouched.high),
            worst=label in worst,
        )

    chosen = charts.select([part.value for part in result.by_class])
    return _Panel(
        number=number,
        key=key,
        result=result,
        rows=[row(label) for label in chosen.weakest],
        strongest=[row(label) for label in chosen.strongest],
        left_out=chosen.left_out,
        present=sum(part.n > 0 for part in result.by_class),
        tied=sum(result.worst is not None and part.value == result.worst.value for part in result.by_class),
    )


def _worst_labels(result: Result) -> set[int]:
    return marked([part.value for part in result.by_class], result.worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One cell of a confusion matrix."""

    count: int
    percent: float
    """Of its row."""
    shade: float
    diagonal: bool
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfusionRow:
    """What the examples of one class are taken for."""

    name: str
    total: int
    cells: list[_Cell]
    apart: bool
    """Whether another superclass begins here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Confusion:
    """One confusion matrix, empty where it cannot be read, and its largest errors in words."""

    number: int
    key: str
    rows: list[_ConfusionRow]
    largest: list[str]


def _confusions(report: ClassReport) -> list[_Confusion]:
    """Of every result, the strongest first."""
    groups = report.dataset.together
    order = [label for group in groups for label in group]
    apart = {group[0] for group in groups[1:]}
    keys = sorted(report.confusion, key=lambda key: key != report.strongest)
    return [
        _confusion(number, key, report.confusion[key], report.dataset.classes, order, apart)
        for number, key in enumerate(keys)
    ]


def _confusion(
    number: int, key: str, counts: list[list[int]], classes: list[str], order: list[int], apart: set[int]
) -> _Confusion:
    """The matrix, where it can be read, and the largest errors."""
    totals = [sum(row) for row in counts]

    def cell(true: int, predicted: int) -> _Cell:
        count, total = counts[true][predicted], totals[true]
        percent = 100 * count / total if total else 0.0
        what = "kept" if true == predicted else f"taken for {classes[predicted]}"
        return _Cell(
            count=count,
            percent=percent,
            shade=charts.shade(count, total),
            diagonal=true == predicted,
            title=f"{classes[true]} {what}: {count:,} of {total:,}, {story.percent(percent)}",
        )

    def row(true: int) -> _ConfusionRow:
        cells = [cell(true, predicted) for predicted in order]
        return _ConfusionRow(name=classes[true], total=totals[true], cells=cells, apart=true in apart)

    many = len(classes) > charts.MANY_CLASSES
    errors = (
        (true, predicted) for true in order for predicted in order if true != predicted and counts[true][predicted]
    )
    largest = nlargest(MANY_CONFUSED if many else MOST_CONFUSED, errors, lambda pair: counts[pair[0]][pair[1]])
    return _Confusion(
        number=number,
        key=key,
        rows=[] if many else [row(true) for true in order],
        largest=[cell(*pair).title for pair in largest],
    )


def _shown(report: ClassReport) -> Markup | None:
    """Images of the weakest class that were broken."""
    found = report.examples
    if found is None:
        return None
    return figures.Gallery([one.card(one.attack, found.amplify) for one in found.examples]).html()


def _texts(report: ClassReport) -> dict[str, str]:
    """The table in the formats that people paste."""
    return {name: report.table(format=name.lower()) for name in ("CSV", "LaTeX", "Markdown")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """How many examples fell to what."""

    key: str | None
    """None: to nothing."""
    count: int
    share: float


def _broken(report: ClassReport) -> list[_Broken] | None:
    """By the first of natural and the attacks that broke an example; None where the verdicts are not at hand."""
    verdicts = report.verdicts
    if verdicts is None or not len(verdicts):
        return None
    counts = Counter(verdicts.broken_by)
    return [
        _Broken(key=key, count=counts[key], share=round(100 * counts[key] / len(verdicts), 2))
        for key in (*verdicts.parts, None)
    ]


def _facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as flat rows of text."""
    facts: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            facts += _facts(value, f"{prefix}{key} ")
        else:
            facts.append((f"{prefix}{key}", _fact(value)))
    return facts


def _fact(value: Any) -> str:
    if value is None:
        return story.ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # A year or a seed wants no separators, a number of parameters does.
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(_fact(part) for part in value)
    return str(value)


def _model_name(report: ClassReport) -> str:
    return str(report.model.get("name", "model"))
