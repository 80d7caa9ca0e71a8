"""The page of one model, and its fragment for a notebook."""

# K classes

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from classwise.reporting import charts, text, trust_section, wording
from classwise.reporting.figures import Gallery
from classwise.reporting.formatting import ABSENT, listing, number, percent
from classwise.reporting.rendering import CV, MCD, count_cell, estimate_cell, name_cell, render, worst_cells
from classwise.reporting.results import ReportData, Result
from classwise.reporting.tables import Cell, Grid
from classwise.storage.verdicts import NATURAL, WORST_CASE

MOST_CONFUSED, MANY_CONFUSED = 5, 20
"""Number of wrong predictions listed below a confusion matrix, and in its place if it has too many classes."""


def report_page(report: ReportData) -> str:
    """Return the page: one file that needs no network."""
    attacks = [key for key in report.results if key not in (NATURAL, WORST_CASE)]
    keys = [report.strongest, *attacks] if attacks else [report.strongest]
    return render(
        "report.html",
        report=report,
        name=_model_name(report),
        verdict=wording.report_verdict(report),
        allocation=wording.allocation_sentence(report),
        attacks=len(report.attacks or attacks),
        panels=[_panel(report, key) for key in keys],
        keys=keys,
        results=_results(report),
        classes=_classes(report),
        texts={name: text.render(report, name.lower()) for name in ("CSV", "LaTeX", "Markdown")},
        gallery=_gallery(report),
        confusions=list(_confusions(report)),
        broken=_broken(report),
        corruptions=list(_corruptions(report)),
        findings=trust_section.findings(report),
        probes=_probes(report),
        curves=charts.probe_curves(report),
        attack_table=_attacks(report),
        attack_notes=list(_attack_notes(report)),
        costs=_costs(report),
        settings=_settings(report),
        trained=_facts(report.model.get("trained", {})),
    )


def report_fragment(report: ReportData) -> str:
    """Return a small table with bars, styled inline, for a notebook."""
    key = report.strongest
    result, natural = report[key], report[NATURAL]
    chosen = charts.select([part.value for part in result.by_class])
    return render(
        "report_fragment.html",
        report=report,
        name=_model_name(report),
        key=key,
        result=result,
        verdict=wording.report_verdict(report),
        rows=[(result.by_class[label], natural.by_class[label], label in _lowest(result)) for label in chosen.labels],
        left_out=chosen.left_out,
    )


def _panel(report: ReportData, key: str) -> dict[str, Any]:
    """Content for one position of the attack switch."""
    result = report[key]
    return {
        "key": key,
        "result": result,
        "chart": charts.class_bars(report, key).html(),
        "tied": sum(result.worst is not None and part.value == result.worst.value for part in result.by_class),
    }


def _results(report: ReportData) -> Grid:
    return Grid(
        "Results",
        [
            Cell("Result"),
            Cell("Average"),
            Cell("Worst class", css="left"),
            Cell("its accuracy"),
            Cell("selection-corrected"),
            CV,
            MCD,
            Cell("n"),
        ],
        [
            [
                name_cell(key),
                estimate_cell(result.overall),
                *worst_cells(result.worst, [part.value for part in result.by_class]),
                Cell(number(result.cv)),
                Cell(number(result.mcd)),
                count_cell(result.overall.n),
            ]
            for key, result in report.results.items()
        ],
        strong=frozenset({list(report.results).index(report.strongest)}),
    )


def _classes(report: ReportData) -> Grid:
    lowest = {key: _lowest(result) for key, result in report.results.items()}
    rows = []
    for label, name in enumerate(report.dataset.classes):
        n = report[NATURAL].by_class[label].n
        parts = [
            estimate_cell(result.by_class[label], "accent" if label in lowest[key] else "")
            for key, result in report.results.items()
        ]
        absent = [Cell(ABSENT, "no examples", "absent", span=len(parts))]
        rows.append([name_cell(name), count_cell(n), *(parts if n else absent)])
    return Grid(
        "Accuracy of every class",
        [Cell("Class"), Cell("n"), *map(Cell, report.results)],
        rows,
        css=_long(report),
        sortable=True,
    )


def _confusions(report: ReportData) -> Iterator[dict[str, Any]]:
    """One matrix per result, the strongest first, with its numbers as a table and its largest errors."""
    groups, classes = report.dataset.together, report.dataset.classes
    order = [label for group in groups for label in group]
    few = len(classes) <= charts.MANY_CLASSES
    for key in sorted(report.confusion, key=lambda key: key != report.strongest):
        counts, drawn = report.confusion[key], charts.confusion_matrix(report, key)
        numbers = Grid(
            "Confusion matrix",
            [Cell(""), *(name_cell(classes[label]) for label in order)],
            [[name_cell(classes[true]), *(Cell(str(counts[true][label])) for label in order)] for true in order],
            caption=f"True class in rows, predicted class in columns, {key}",
        )
        yield {
            "key": key,
            "chart": drawn.html() if drawn else None,
            "table": numbers if few else None,
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


def _corruptions(report: ReportData) -> Iterator[Grid]:
    """Accuracy by kind and severity, and by class and family."""
    found = report.corruptions
    if found is None:
        return
    cells = {(part.kind, part.severity): part for part in found.results}
    severities = sorted({part.severity for part in found.results})

    def shaded(kind: str, severity: int) -> Cell:
        part = cells.get((kind, severity))
        if part is None or part.overall.value is None:
            return Cell(ABSENT, css="absent")
        lost = round((100 - part.overall.value) / 10)
        tip = f"{kind}: {percent(part.overall.value)} ({number(part.overall.low)}–{number(part.overall.high)})"
        return Cell(number(part.overall.value), css=f"lost-{lost}", tip=tip)

    yield Grid(
        "Accuracy by kind and severity",
        [Cell("Family", css="left"), Cell("Kind", css="left"), *(Cell(str(severity)) for severity in severities)],
        [
            [Cell(family), Cell(kind, css="left"), *(shaded(kind, severity) for severity in severities)]
            for family, kind in dict.fromkeys((part.family, part.kind) for part in found.results)
        ],
        css="shaded",
        caption=f"Accuracy in percent by kind and severity; natural {number(report[NATURAL].overall.value)}",
    )
    yield Grid(
        "Accuracy by class and family",
        [Cell("Class"), *(Cell(family.family) for family in found.families)],
        [
            [name_cell(name), *(estimate_cell(family.by_class[label]) for family in found.families)]
            for label, name in enumerate(report.dataset.classes)
        ],
        css=_long(report),
    )


def _probes(report: ReportData) -> Grid | None:
    rows = trust_section.rows(report)
    found = [[Cell(what), Cell(seen)] for what, seen in rows]
    return Grid("Trust checks", [Cell("Check"), Cell("Result")], found, css="text") if rows else None


def _attacks(report: ReportData) -> Grid | None:
    if not report.attacks:
        return None
    counts = ("Attacked", "Rejected", "Forwards", "Backwards")
    return Grid(
        "Attacks and their settings",
        [Cell("Attack"), Cell("Spec"), Cell("Settings"), *(Cell(name, css="right") for name in (*counts, "Seconds"))],
        [
            [
                name_cell(key),
                Cell(attack.spec, css="mono"),
                Cell(_decided(attack.settings), css="mono"),
                *(Cell(f"{getattr(attack, name.lower()):,}", css="right") for name in counts),
                Cell(number(attack.seconds), css="right"),
            ]
            for key, attack in report.attacks.items()
        ],
        css="text",
    )


def _attack_notes(report: ReportData) -> Iterator[dict[str, Any]]:
    """Return for each attack its strongest variant, its stages and its audit."""
    counts = ("Attacked", "Broke", "Forwards", "Backwards")
    for key, attack in report.attacks.items():
        stages = Grid(
            f"Stages of {key}",
            [Cell("Stage"), Cell("Selects", css="left"), *map(Cell, counts), Cell("Seconds")],
            [
                [
                    name_cell(stage.name),
                    Cell(wording.SELECTED.get(stage.whom, stage.whom), css="left"),
                    *(count_cell(getattr(stage, name.lower())) for name in counts),
                    Cell(number(stage.seconds)),
                ]
                for stage in attack.stages
            ],
            caption=f"{key} by stage",
        )
        yield {
            "key": key,
            "strongest": attack.strongest,
            "stages": stages if attack.stages else None,
            "audit": wording.audit_sentence(attack.audit) if attack.audit else None,
        }


def _costs(report: ReportData) -> Grid | None:
    """Mean passes per attacked example, by class."""
    costs = {key: attack.by_class for key, attack in report.attacks.items() if attack.by_class}
    rows = [
        [
            name_cell(name),
            *(
                Cell(f"{number(part.forwards / part.attacked)} + {number(part.backwards / part.attacked)}")
                if part.attacked
                else Cell(ABSENT)
                for part in (parts[label] for parts in costs.values())
            ),
        ]
        for label, name in enumerate(report.dataset.classes)
    ]
    return Grid("Passes by class", [Cell("Class"), *map(Cell, costs)], rows) if costs else None


def _gallery(report: ReportData) -> Markup | None:
    """Images of the weakest class that attacks broke."""
    found = report.examples
    return None if found is None else Gallery([one.card(one.attack, found.amplify) for one in found.examples]).html()


def _settings(report: ReportData) -> list[tuple[str, str]]:
    threat, data = report.threat, report.dataset
    value = f"{threat.eps:g}"
    exact = "" if value == threat.eps_text else f" ({value})"
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
    if isinstance(value, list | tuple):
        return ", ".join(_fact(part) for part in value)
    return str(value)


def _lowest(result: Result) -> set[int]:
    return charts.marked([part.value for part in result.by_class], result.worst)


def _long(report: ReportData) -> str:
    return "long" if len(report.dataset.classes) > charts.MANY_CLASSES else ""


def _model_name(report: ReportData) -> str:
    return str(report.model.get("name", "model"))
