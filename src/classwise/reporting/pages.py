"""Reports and comparisons as HTML: whole pages that need nothing else, and fragments for notebooks.

Every text from outside (class, model and attack names, settings) reaches the page through Jinja's autoescape; ids
and selectors are built from positions, never from names.
"""

# K classes

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from classwise.errors import InputError, unknown
from classwise.reporting import charts, figures, story, trust
from classwise.reporting.comparison import ClassChange, Comparison, Row
from classwise.reporting.estimates import ClassEstimate, Estimate
from classwise.reporting.figures import Figure
from classwise.reporting.leaderboard import Leaderboard
from classwise.reporting.report import ClassReport, Result, Worst
from classwise.reporting.tables import Table
from classwise.verdicts import NATURAL, WORST_CASE

COLOURED_MODELS = 6
"""Models that get a colour of their own, and bars; tables show all."""
LONG_STORY = 5
"""Beyond this many models a page opens with the first and the last sentence and folds away those in between."""
MOST_CONFUSED = 5
MOST_MARKED = 3


def report_page(report: ClassReport) -> str:
    """A whole document that opens without a network."""
    return _render(
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
    return _render(
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


class Telling(Protocol):
    """Something that was found out, as a page shows it."""

    def sentences(self) -> list[str]: ...

    def figures(self) -> list[Figure]: ...

    def tables(self) -> list[Table]: ...


def answers_page(title: str, eyebrow: str, answers: Mapping[str, Telling]) -> str:
    """A whole document with figures under the pointer's hand; it opens without a network."""
    return _render(
        "answers.html",
        title=title,
        eyebrow=eyebrow,
        script=Markup(figures.script()),
        answers=[
            {
                "name": name,
                "sentences": answer.sentences(),
                "tables": answer.tables(),
                "figures": answer.figures(),
            }
            for name, answer in answers.items()
        ],
    )


def comparison_page(
    comparison: Comparison,
    *,
    title: str | None = None,
    story: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """A whole document. ``story``: the sentences to open with, else those the numbers support by themselves.

    ``links``: from a model's name to the relative address of its own report.
    """
    warning = _unpaired(comparison)
    told = [text for text in _sentences(comparison) if text != warning]
    each: list[str] = []
    if len(comparison.models) > LONG_STORY:
        told, each = [told[0], *told[len(comparison.models) :]], told[1 : len(comparison.models)]
    return _render(
        "comparison.html",
        comparison=comparison,
        title=title or _title(comparison.models),
        story=list(story) or told,
        each=[] if story else each,
        warning=warning,
        links=_checked(links or {}, comparison),
        panels=_comparison_panels(comparison),
        coloured=COLOURED_MODELS,
    )


def site_page(board: Leaderboard, *, title: str, links: Sequence[str]) -> str:
    """A whole document: every entry of a leaderboard. ``links``: the relative addresses of the runs' reports."""
    shown = {
        "Data set": list(dict.fromkeys(entry.dataset for entry in board.entries)),
        "Threat": list(dict.fromkeys(entry.threat for entry in board.entries)),
        "Architecture": list(dict.fromkeys(entry.architecture for entry in board.entries)),
        "Method": list(dict.fromkeys(entry.method for entry in board.entries)),
        "Result": list(dict.fromkeys(entry.result for entry in board.entries)),
    }
    results = shown["Result"]
    fields = ("dataset", "threat", "architecture", "method", "result")
    return _render(
        "site.html",
        board=board,
        title=title,
        links=[_relative(href) for href in links],
        filters=shown,
        chosen=WORST_CASE if WORST_CASE in results else results[0] if results else "",
        rows=[
            (entry, [shown[name].index(getattr(entry, field)) for name, field in zip(shown, fields, strict=True)])
            for entry in board.entries
        ],
    )


def comparison_fragment(comparison: Comparison) -> str:
    """A small table of the models, styled inline, for a notebook."""
    return _render(
        "comparison_fragment.html",
        comparison=comparison,
        key=comparison.strongest,
        rows=comparison[comparison.strongest],
        story=_sentences(comparison),
    )


# One model


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


def _marked(values: Sequence[float | None], worst: Worst | None) -> set[int]:
    """The weakest class, or a few that share the lowest value; where many do, none of them stands out."""
    tied = set() if worst is None else {label for label, value in enumerate(values) if value == worst.value}
    return tied if len(tied) <= MOST_MARKED else set()


def _worst_labels(result: Result) -> set[int]:
    return _marked([part.value for part in result.by_class], result.worst)


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
    """One confusion matrix, and its largest errors in words."""

    number: int
    key: str
    rows: list[_ConfusionRow]
    largest: list[str]


def _confusions(report: ClassReport) -> list[_Confusion]:
    """All matrices, the strongest first; none where there are too many classes to be read."""
    classes, groups = report.dataset.classes, list(report.dataset.superclasses.values())
    if len(classes) > charts.MANY_CLASSES:
        return []
    order = [label for group in groups for label in group] or list(range(len(classes)))
    apart = {group[0] for group in groups[1:]}
    keys = sorted(report.confusion, key=lambda key: key != report.strongest)
    return [_confusion(number, key, report.confusion[key], classes, order, apart) for number, key in enumerate(keys)]


def _confusion(
    number: int, key: str, counts: list[list[int]], classes: list[str], order: list[int], apart: set[int]
) -> _Confusion:
    rows, errors = [], []
    for true in order:
        total = sum(counts[true])
        cells = []
        for predicted in order:
            count = counts[true][predicted]
            percent = 100 * count / total if total else 0.0
            what = "kept" if true == predicted else f"taken for {classes[predicted]}"
            title = f"{classes[true]} {what}: {count:,} of {total:,}, {story.percent(percent)}"
            if count and true != predicted:
                errors.append((count, title))
            shade = charts.shade(count, total)
            cells.append(_Cell(count=count, percent=percent, shade=shade, diagonal=true == predicted, title=title))
        rows.append(_ConfusionRow(name=classes[true], total=total, cells=cells, apart=true in apart))
    largest = sorted(errors, key=lambda error: -error[0])[:MOST_CONFUSED]
    return _Confusion(number=number, key=key, rows=rows, largest=[title for _, title in largest])


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


# Several models


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelBar:
    """One model's bar in a class."""

    number: int
    model: str
    value: float | None
    bar: charts.Bar | None
    worst: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassGroup:
    """The bars of one class."""

    name: str
    bars: list[_ModelBar]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangeCell:
    """One model in one class: its value, and the change where it was tested."""

    value: float | None
    change: ClassChange | None
    told: bool
    worst: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangeRow:
    """One class, over all models."""

    name: str
    baseline: float | None
    baseline_worst: bool
    cells: list[_ChangeCell]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparisonPanel:
    """What one position of the switch shows."""

    number: int
    key: str
    rows: list[Row]
    groups: list[_ClassGroup]
    strongest: list[_ClassGroup]
    left_out: int
    scatter: charts.Scatter | None
    scatter_numbers: list[int]
    radar: charts.Radar | None
    changes: list[_ChangeRow]
    changes_left_out: int
    untested: list[str]


def _comparison_panels(comparison: Comparison) -> list[_ComparisonPanel]:
    keys = list(reversed(comparison.results))
    return [_comparison_panel(number, key, comparison) for number, key in enumerate(keys)]


def _comparison_panel(number: int, key: str, comparison: Comparison) -> _ComparisonPanel:
    rows, classes = comparison[key], comparison.dataset.classes
    worst = [_marked(row.shares, row.worst) for row in rows]
    means = [charts.mean([row.shares[label] for row in rows]) for label in range(len(classes))]
    chosen = charts.select(means, keep=[row.worst.label for row in rows if row.worst])

    def group(label: int) -> _ClassGroup:
        bars = [
            _ModelBar(
                number=position,
                model=row.model,
                value=part.value,
                bar=charts.bar(part.value, part.low, part.high),
                worst=label in worst[position],
            )
            for position, row in enumerate(rows[:COLOURED_MODELS])
            for part in [row.by_class[label]]
        ]
        return _ClassGroup(name=classes[label], bars=bars)

    placed = [(position, row) for position, row in enumerate(rows) if row.worst and row.overall.value is not None]
    changes, changes_left_out = _change_rows(rows, classes, worst)
    return _ComparisonPanel(
        number=number,
        key=key,
        rows=rows,
        groups=[group(label) for label in chosen.weakest],
        strongest=[group(label) for label in chosen.strongest],
        left_out=chosen.left_out,
        scatter=charts.scatter([_point(row) for _, row in placed]),
        scatter_numbers=[position for position, _ in placed],
        radar=charts.radar(classes, [row.shares for row in rows[:COLOURED_MODELS]]),
        changes=changes,
        changes_left_out=changes_left_out,
        untested=[row.model for row in rows[1:] if row.change is None],
    )


def _point(row: Row) -> tuple[str, charts.Measured, charts.Measured]:
    overall, worst = row.overall, row.worst
    assert worst is not None
    assert overall.value is not None
    assert overall.low is not None
    assert overall.high is not None
    average = charts.Measured(value=overall.value, low=overall.low, high=overall.high)
    return row.model, average, charts.Measured(value=worst.value, low=worst.low, high=worst.high)


def _change_rows(rows: list[Row], classes: list[str], worst: list[set[int]]) -> tuple[list[_ChangeRow], int]:
    """Class by class; of many classes those whose change is surest, or without tests the weakest of the baseline."""
    baseline, *others = rows
    changes = [{part.label: part for part in row.changes} for row in others]
    labels = list(range(len(classes)))
    if len(labels) > charts.MANY_CLASSES:
        surest = [min((c[label].p_value for c in changes if label in c), default=1.0) for label in labels]
        values = [100.0 if value is None else value for value in baseline.shares]
        labels = sorted(labels, key=lambda label: (surest[label], values[label], label))[: charts.MANY_CLASSES]

    def cell(label: int, position: int, row: Row) -> _ChangeCell:
        change = changes[position].get(label)
        return _ChangeCell(
            value=row.shares[label],
            change=change,
            told=change is not None and change.p_value < story.LEVEL,
            worst=label in worst[position + 1],
        )

    table = [
        _ChangeRow(
            name=classes[label],
            baseline=baseline.shares[label],
            baseline_worst=label in worst[0],
            cells=[cell(label, position, row) for position, row in enumerate(others)],
        )
        for label in labels
    ]
    return table, len(classes) - len(labels)


def _title(models: Sequence[str]) -> str:
    who = story.listing(models) if len(models) <= 4 else f"{len(models)} models"
    return f"{who}, class by class"


# ``comparison_page`` takes its sentences as ``story``, which hides the module of that name there.
_sentences, _unpaired = story.comparison_sentences, story.unpaired


def _checked(links: Mapping[str, str], comparison: Comparison) -> dict[str, str]:
    """Links stay relative: a page of ours points at nothing outside its own directory tree."""
    for model in links:
        if model not in comparison.models:
            raise unknown("model", model, comparison.models)
    return {model: _relative(href) for model, href in links.items()}


def _relative(href: str) -> str:
    parts = urlsplit(href)
    if parts.scheme or parts.netloc:
        raise InputError(f"a link must be a relative path, got {href!r}")
    return href


# Templates


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("classwise.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files("classwise.reporting").joinpath("templates/page.js").read_text(encoding="utf-8")
    environment.filters.update(
        percent=story.percent,
        number=story.number,
        signed=story.signed,
        audit_sentence=story.audit_sentence,
        allocation_sentence=story.allocation_sentence,
        p_text=story.p_text,
        listing=story.listing,
        unbroken=_unbroken,
        count=lambda value: f"{value:,}",
        compact=lambda value: f"{value:g}",
        decided=lambda settings: re.sub(r"\b\w+=None(, |(?=\)))", "", settings).replace(", )", ")"),
    )
    environment.globals.update(
        interval=story.interval,
        NATURAL=NATURAL,
        WORST_CASE=WORST_CASE,
        LEVEL=story.LEVEL,
        WHOM=story.WHOM,
        SCATTER_HEIGHT=charts.SCATTER_HEIGHT,
        RADAR_SIZE=charts.RADAR_SIZE,
        SCRIPT=Markup(script),
        SCRIPT_DIGEST=f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
    )
    return environment


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def _printable(value: Any) -> Any:
    """Show what cannot or must not be written as a replacement character.

    A name made of undecodable bytes (a path, say) holds surrogates that no file can be written with, and one
    that turns the direction of writing would turn the rest of its sentence too.
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNPRINTABLE.sub("\ufffd", value)
    return value


def _unbroken(text: str) -> str:
    """Keep an interval and a p-value on one line."""
    text = re.sub(r"(?<=\d)–(?=\d)", "\u2060–\u2060", text)
    return re.sub(r"\bp ([<=]) (?=[01])", "p\u00a0\\1\u00a0", text)


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)
