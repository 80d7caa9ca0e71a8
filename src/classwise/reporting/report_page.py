"""The page of one model, and its fragment for a notebook."""

# K classes

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from classwise.reporting import charts, text, wording
from classwise.reporting.effort import AttackInfo
from classwise.reporting.figures import Gallery
from classwise.reporting.formatting import ABSENT, listing, number, percent
from classwise.reporting.rendering import (
    CV,
    MCD,
    WORST_HEADERS,
    count_cell,
    estimate_cell,
    name_cell,
    render,
    worst_cells,
)
from classwise.reporting.results import ReportData
from classwise.reporting.tables import Cell, Table, table_of
from classwise.reporting.trust_section import trust_table
from classwise.storage.verdicts import NATURAL, WORST_CASE

MOST_CONFUSED, MANY_CONFUSED = 5, 20
"""Number of wrong predictions listed below a confusion matrix, and in its place if it has too many classes."""


def report_page(report: ReportData) -> str:
    """Return the self-contained HTML page of a report."""
    attacks = [key for key in report.results if key not in (NATURAL, WORST_CASE)]
    keys = list(dict.fromkeys([report.strongest, *attacks]))
    examples = report.examples
    return render(
        "report.html",
        report=report,
        name=report.name,
        verdict=wording.report_verdict(report),
        allocation=wording.allocation_sentence(report),
        attacks=len(report.attacks or attacks),
        panels=[(key, report[key], charts.class_bars(report, key).html()) for key in keys],
        keys=keys,
        results=_results(report),
        classes=_classes(report),
        texts={name: text.render(report, name.lower()) for name in ("CSV", "LaTeX", "Markdown")},
        gallery=examples and Gallery([one.card(one.attack, examples.amplify) for one in examples.examples]).html(),
        confusions=list(_confusions(report)),
        broken=_broken(report),
        corruptions=_corruptions(report),
        trust=trust_table(report),
        curves=charts.probe_curves(report),
        attack_table=_attacks(report.attacks),
        attack_notes=[(key, attack, _stages(key, attack), _audit(attack)) for key, attack in report.attacks.items()],
        costs=_costs(report),
        settings=_settings(report),
        trained=_facts(report.model.get("trained", {})),
    )


def report_fragment(report: ReportData) -> str:
    """Return a small table with bars, styled inline, for a notebook."""
    key = report.strongest
    result, natural = report[key], report[NATURAL]
    chosen = charts.select(result.shares)
    marked = charts.marked(result)
    return render(
        "report_fragment.html",
        report=report,
        name=report.name,
        key=key,
        result=result,
        verdict=wording.report_verdict(report),
        rows=[(result.by_class[label], natural.by_class[label], label in marked) for label in chosen.labels],
        left_out=chosen.left_out,
    )


def _results(report: ReportData) -> Table:
    rows = [
        [
            name_cell(key),
            estimate_cell(result.overall),
            *worst_cells(result),
            number(result.cv),
            number(result.mcd),
            count_cell(result.overall.n),
        ]
        for key, result in report.results.items()
    ]
    columns = ["Result", "Average", *WORST_HEADERS, CV, MCD, "n"]
    return Table(title="Results", columns=columns, rows=rows, strong=list(report.results).index(report.strongest))


def _classes(report: ReportData) -> Table:
    marked = [charts.marked(result) for result in report.results.values()]
    rows = []
    for label, name in enumerate(report.dataset.classes):
        n = report[NATURAL].by_class[label].n
        parts = [
            estimate_cell(result.by_class[label], "accent" if label in lowest else "")
            for result, lowest in zip(report.results.values(), marked, strict=True)
        ]
        absent = [Cell(ABSENT, "no examples", "absent", span=len(parts))]
        rows.append([name_cell(name), count_cell(n), *(parts if n else absent)])
    columns = ["Class", "n", *report.results]
    return Table(title="Accuracy of every class", columns=columns, rows=rows, css=_long(report), sortable=True)


def _confusions(report: ReportData) -> Iterator[dict[str, Any]]:
    """One matrix per result, the strongest first, with its numbers as a table and its largest errors."""
    classes, order = report.dataset.classes, report.dataset.order
    for key in sorted(report.confusion, key=lambda key: key != report.strongest):
        counts, drawn = report.confusion[key], charts.confusion_matrix(report, key)
        numbers = Table(
            title="Confusion matrix",
            columns=["", *(name_cell(classes[label]) for label in order)],
            rows=[[name_cell(classes[true]), *(str(counts[true][label]) for label in order)] for true in order],
            caption=f"True class in rows, predicted class in columns, {key}",
        )
        yield {
            "key": key,
            "chart": drawn.html() if drawn else None,
            "table": None if _long(report) else numbers,
            "largest": charts.largest_errors(report, key, MOST_CONFUSED if drawn else MANY_CONFUSED),
        }


def _broken(report: ReportData) -> list[tuple[str, int, float, bool]] | None:
    """Count examples by the first attack that broke them, natural errors first; None without verdicts."""
    verdicts = report.verdicts
    if verdicts is None or not len(verdicts):
        return None
    counts = Counter(verdicts.broken_by)
    names = {None: "none (survived)", NATURAL: "none (misclassified without attack)"}
    return [
        (names.get(key, str(key)), counts[key], round(100 * counts[key] / len(verdicts), 2), key is None)
        for key in (*verdicts.parts, None)
    ]


def _corruptions(report: ReportData) -> list[Table]:
    """Accuracy by kind and severity, and by class and family."""
    found = report.corruptions
    if found is None:
        return []
    cells = {(part.kind, part.severity): part.overall for part in found.results}
    severities = sorted({part.severity for part in found.results})

    def shaded(kind: str, severity: int) -> Cell:
        part = cells.get((kind, severity))
        if part is None or part.value is None:
            return Cell(ABSENT, css="absent")
        tip = f"{kind}: {percent(part.value)} ({number(part.low)}–{number(part.high)})"
        return Cell(number(part.value), css=f"lost-{round((100 - part.value) / 10)}", tip=tip)

    return [
        Table(
            title="Accuracy by kind and severity",
            columns=[Cell("Family", css="left"), Cell("Kind", css="left"), *map(str, severities)],
            rows=[
                [family, Cell(kind, css="left"), *(shaded(kind, severity) for severity in severities)]
                for family, kind in dict.fromkeys((part.family, part.kind) for part in found.results)
            ],
            css="shaded",
            caption=f"Accuracy in percent by kind and severity; natural {number(report[NATURAL].overall.value)}",
        ),
        Table(
            title="Accuracy by class and family",
            columns=["Class", *(family.family for family in found.families)],
            rows=[
                [name_cell(name), *(estimate_cell(family.by_class[label]) for family in found.families)]
                for label, name in enumerate(report.dataset.classes)
            ],
            css=_long(report),
        ),
    ]


def _attacks(attacks: Mapping[str, AttackInfo]) -> Table | None:
    def count(name: str) -> Any:
        return lambda item: Cell(f"{getattr(item[1], name):,}", css="right")

    columns: dict[str, Any] = {
        "Attack": lambda item: name_cell(item[0]),
        "Spec": lambda item: Cell(item[1].spec, css="mono"),
        "Settings": lambda item: Cell(_decided(item[1].settings), css="mono"),
        **{Cell(name.title(), css="right"): count(name) for name in ("attacked", "rejected", "forwards", "backwards")},
        Cell("Seconds", css="right"): lambda item: Cell(number(item[1].seconds), css="right"),
    }
    return table_of("Attacks and their settings", attacks.items(), columns, css="text") if attacks else None


def _stages(key: str, attack: AttackInfo) -> Table | None:
    columns: dict[str, Any] = {
        "Stage": lambda stage: name_cell(stage.name),
        Cell("Selects", css="left"): lambda stage: Cell(wording.SELECTED.get(stage.whom, stage.whom), css="left"),
        "Attacked": lambda stage: count_cell(stage.attacked),
        "Broke": lambda stage: count_cell(stage.broke),
        "Forwards": lambda stage: count_cell(stage.forwards),
        "Backwards": lambda stage: count_cell(stage.backwards),
        "Seconds": lambda stage: number(stage.seconds),
    }
    title = f"Stages of {key}"
    return table_of(title, attack.stages, columns, caption=f"{key} by stage") if attack.stages else None


def _audit(attack: AttackInfo) -> str | None:
    return wording.audit_sentence(attack.audit) if attack.audit else None


def _costs(report: ReportData) -> Table | None:
    """Mean passes per attacked example, by class."""
    costs = {key: attack.by_class for key, attack in report.attacks.items() if attack.by_class}

    def cell(key: str, label: int) -> str:
        part = costs[key][label]
        if not part.attacked:
            return ABSENT
        return f"{number(part.forwards / part.attacked)} + {number(part.backwards / part.attacked)}"

    rows = [
        [name_cell(name), *(cell(key, label) for key in costs)] for label, name in enumerate(report.dataset.classes)
    ]
    return Table(title="Passes by class", columns=["Class", *costs], rows=rows) if costs else None


def _settings(report: ReportData) -> list[tuple[str, str]]:
    threat, data = report.threat, report.dataset
    exact = "" if f"{threat.eps:g}" == threat.eps_text else f" ({threat.eps:g})"
    superclasses = [("Superclasses", listing(list(data.superclasses)))] if data.superclasses else []
    model = {("Model" if key == "name" else key): one for key, one in report.model.items() if key != "trained"}
    return [
        ("Threat", f"{threat.norm}, eps = {threat.eps_text}{exact}"),
        ("Data", f"{data.name}, {data.split}, {data.n:,} examples"),
        *superclasses,
        *_facts(model),
    ]


def _decided(settings: str) -> str:
    """The settings of an attack without those that are None."""
    return re.sub(r"\b\w+=None(, |(?=\)))", "", settings).replace(", )", ")")


def _facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as flat rows of text."""
    facts: list[tuple[str, str]] = []
    for key, value in values.items():
        facts += _facts(value, f"{prefix}{key} ") if isinstance(value, Mapping) else [(f"{prefix}{key}", _fact(value))]
    return facts


def _fact(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # A year or a seed has no separators, a number of parameters has.
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    return ", ".join(map(_fact, value)) if isinstance(value, list | tuple) else str(value)


def _long(report: ReportData) -> str:
    return "long" if len(report.dataset.classes) > charts.MANY_CLASSES else ""
