"""Several models side by side, the first as the baseline: averages, worst classes, rho, and paired tests."""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from classwise.core.errors import InputError
from classwise.metrics import mcnemar, paired_changes
from classwise.reporting import text
from classwise.reporting.comparison_page import comparison_fragment, comparison_page
from classwise.reporting.estimates import rounded_rho
from classwise.reporting.report import ClassReport, load_report
from classwise.reporting.results import Change, ClassChange, ComparisonData, Result, Row
from classwise.storage.files import write_text
from classwise.storage.verdicts import NATURAL, WORST_CASE

__all__ = ["Change", "ClassChange", "Comparison", "Row", "compare"]


class Comparison(ComparisonData):
    """Models compared with the first of them."""

    @overload
    def table(self, key: str | None = None) -> list[dict[str, Any]]: ...

    @overload
    def table(self, key: str | None = None, *, format: str) -> str: ...

    def table(self, key: str | None = None, *, format: str | None = None) -> list[dict[str, Any]] | str:
        """Return a row per model for pandas, of the strongest result or of ``key``.

        With a format (markdown, latex or csv) as text, of every result or of ``key``.
        """
        if format is not None:
            return text.render(self, format, key)
        return [
            {
                "model": row.model,
                "average": row.overall.value,
                "worst": row.worst.value if row.worst else None,
                "worst class": row.worst.name if row.worst else None,
                "cv": row.cv,
                "mcd": row.mcd,
                "rho": row.rho,
            }
            for row in self[key or self.strongest]
        ]

    def to_html(self, path: str | Path) -> None:
        """Write the page, one file without external resources."""
        write_text(Path(path), comparison_page(self))

    def _repr_html_(self) -> str:
        return comparison_fragment(self)


def compare(*reports: ClassReport | str | Path, names: Sequence[str] | None = None) -> Comparison:
    """Compare reports (or run directories) with the first of them."""
    if len(reports) < 2:
        raise InputError(f"comparing needs at least two reports, got {len(reports)}")
    loaded = [report if isinstance(report, ClassReport) else load_report(report) for report in reports]
    labels = list(names) if names is not None else _names(reports, loaded)
    if len(labels) != len(loaded):
        raise InputError(f"expected {len(loaded)} names, one per report, got {len(labels)}")
    baseline = loaded[0]
    for label, report in zip(labels[1:], loaded[1:], strict=True):
        for what, expected in _setup(baseline).items():
            _same(what, label, expected, _setup(report)[what])
    keys = [key for key in baseline.results if all(key in report.results for report in loaded)]
    for label, report in zip(labels[1:], loaded[1:], strict=True):
        for key in set(keys) & set(baseline.attacks) & set(report.attacks):
            _same(f"attack {key}", label, _settings(baseline)[key], _settings(report)[key])
        if WORST_CASE in keys and _settings(report) != _settings(baseline):
            keys.remove(WORST_CASE)  # over different attacks it is not comparable
    if keys == [NATURAL] and all(report.attacks for report in loaded):
        raise InputError(
            f"cannot compare {', '.join(labels)}: they have no attack in common; evaluate all with the same attack"
        )
    paired = [_paired(baseline, report) for report in loaded]
    return Comparison(
        dataset=baseline.dataset,
        threat=baseline.threat,
        models=labels,
        paired=all(paired),
        results={
            key: [
                _row(key, label, report, None if number == 0 else baseline, paired[number])
                for number, (label, report) in enumerate(zip(labels, loaded, strict=True))
            ]
            for key in keys
        },
    )


def _row(key: str, model: str, report: ClassReport, baseline: ClassReport | None, paired: bool) -> Row:
    change, changes = _changes(key, report, baseline) if baseline is not None and paired else (None, [])
    rho = None if baseline is None else _rho(report[key], baseline[key])
    return Row(**dict(report[key]), model=model, rho=rho, change=change, changes=changes)


def _rho(result: Result, baseline: Result) -> float | None:
    own, other = ((one.overall.value, one.worst.value if one.worst else None) for one in (result, baseline))
    return rounded_rho(own, other)


def _changes(key: str, report: ClassReport, baseline: ClassReport) -> tuple[Change, list[ClassChange]]:
    ours, theirs = report.verdicts, baseline.verdicts
    assert ours is not None
    assert theirs is not None
    before, after = theirs.survived(key), ours.survived(key)
    gained, lost = int((~before & after).sum()), int((before & ~after).sum())
    classes = report.dataset.classes
    return Change(**_counts(gained, lost, len(ours)), p_value=mcnemar(gained, lost)), [
        ClassChange(
            label=part.label,
            name=classes[part.label],
            **_counts(part.gained, part.lost, part.n),
            p_value=part.p_value,
        )
        for part in paired_changes(ours.label, before, after, len(classes))
    ]


def _counts(gained: int, lost: int, n: int) -> dict[str, Any]:
    return {"points": round(100 * (gained - lost) / n, 4), "gained": gained, "lost": lost, "n": n}


def _paired(one: ClassReport, other: ClassReport) -> bool:
    """Whether both were measured on the same examples, and their verdicts are those of the reports."""
    first, second = one.verdicts, other.verdicts
    if one.dataset.digest != other.dataset.digest or first is None or second is None:
        return False
    for report, verdicts in ((one, first), (other, second)):
        if set(report.results) - {WORST_CASE} - set(verdicts.keys):
            return False
    return np.array_equal(first.index, second.index) and np.array_equal(first.label, second.label)


def _names(reports: Sequence[object], loaded: Sequence[ClassReport]) -> list[str]:
    """Return unique names: of the directory, else of the model, with a number if repeated."""
    names: list[str] = []
    for given, report in zip(reports, loaded, strict=True):
        if isinstance(given, ClassReport):
            name = report.name
        else:
            path = Path(str(given)).resolve()
            name = (path.parent if path.suffix == ".json" else path).name
        number, unique = 1, name
        while unique in names:
            number += 1
            unique = f"{name} ({number})"
        names.append(unique)
    return names


def _same(what: str, label: str, first: str, second: str) -> None:
    if first != second:
        raise InputError(f"cannot compare {label!r} with the baseline: {what}: {second}, baseline: {first}")


def _settings(report: ClassReport) -> dict[str, str]:
    return {key: info.settings for key, info in report.attacks.items()}


def _setup(report: ClassReport) -> dict[str, str]:
    data, threat = report.dataset, report.threat
    return {
        "data": f"{data.name}/{data.split}",
        "classes": ", ".join(data.classes),
        "threat": f"{threat.norm} {threat.eps_text}",
    }
