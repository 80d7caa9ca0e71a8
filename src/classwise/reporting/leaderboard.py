"""A table of many runs: average and worst class of each model and result, seeds merged.

Runs of one recipe that differ only in the seed are one entry, with mean and standard deviation over the seeds. Entries
are comparable if data set, examples, threat and result are the same; rho is against the baseline among those.
"""

# K classes

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from classwise.core.errors import InputError, unknown
from classwise.reporting.estimates import Interval, rounded, rounded_rho
from classwise.reporting.formatting import ABSENT
from classwise.reporting.part import Part
from classwise.reporting.results import ReportData
from classwise.storage.files import digest_json
from classwise.storage.verdicts import NATURAL, WORST_CASE

BASELINE = "trades"


class Spread(Part):
    """A value over seeds."""

    value: float | None
    """The mean."""
    sd: float | None = None
    """Standard deviation; null for one seed."""
    low: float | None = None
    high: float | None = None
    """The interval of a single run."""


class Entry(Part):
    """One model, or its seeds, under one attack."""

    model: str
    architecture: str
    method: str
    dataset: str
    n: int
    threat: str
    result: str
    settings: str
    """Spec of the attack."""
    seeds: list[int | None]
    average: Spread
    worst: Spread
    worst_classes: list[str]
    """The worst class of each seed, without repetition."""
    cv: Spread
    mcd: Spread
    rho: float | None = None
    baseline: bool
    runs: list[int]
    """Indices of its runs."""


class Leaderboard(Part):
    """Entries in decreasing order of the worst class."""

    schema_: Literal["classwise/leaderboard/1"] = Field("classwise/leaderboard/1", alias="schema")
    baseline: str
    entries: list[Entry]


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """Return the run directories with a report in or below these places, each once and in order."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise InputError(f"{place}: no such directory")
        here = sorted(file.parent for file in place.rglob("report.json") if not _is_original(file.parent))
        if not here:
            raise InputError(f"{place} contains no report.json: evaluate a model first")
        found |= dict.fromkeys(path.resolve() for path in here)
    return list(found)


def _is_original(place: Path) -> bool:
    """Whether a directory is the evaluation of an original model inside the directory of its repair."""
    return place.name == "original" and (place.parent / "repair.json").is_file()


def leaderboard(reports: Sequence[ReportData], *, baseline: str = BASELINE) -> Leaderboard:
    """Return all results of all reports. ``baseline``: the method to compute rho against."""
    groups: dict[str, list[int]] = {}
    for number, report in enumerate(reports):
        groups.setdefault(_same_but_for_the_seed(report, number), []).append(number)
    entries = [
        _entry(key, [reports[number] for number in numbers], numbers, baseline)
        for numbers in groups.values()
        for key in reports[numbers[0]].results
    ]
    if baseline != BASELINE and not any(entry.baseline for entry in entries):
        raise unknown("baseline method", baseline, {entry.method for entry in entries} - {ABSENT})
    entries = [_against(entry, entries) for entry in entries]
    entries.sort(key=lambda entry: (-(entry.worst.value or 0.0), -(entry.average.value or 0.0), entry.model))
    return Leaderboard(baseline=baseline, entries=entries)


def unique_class_names(classes: Sequence[str]) -> list[str]:
    """Return unique names of the classes: a repeated name gets its label.

    >>> unique_class_names(["crane", "owl", "crane"])
    ['crane', 'owl', 'crane (class 2)']
    """
    names: dict[str, None] = {}
    for label, name in enumerate(classes):
        while name in names:
            name += f" (class {label})"
        names[name] = None
    return list(names)


def robustbench(reports: Sequence[ReportData]) -> list[dict[str, Any]]:
    """Return a record per run under the keys of RobustBench's model cards, with class accuracies.

    ``autoattack_acc`` is present if AutoAttack or ``fast`` ran.
    """
    return [_card(report) for report in reports]


def _card(report: ReportData) -> dict[str, Any]:
    trained, strongest, names = _trained(report), report[report.strongest], unique_class_names(report.dataset.classes)
    worst = strongest.worst
    judged = [key for key in ("autoattack", "fast") if key in report.results]
    return {
        "name": model_name(report),
        "architecture": _architecture(report),
        "dataset": report.dataset.name,
        "threat_model": report.threat.norm,
        "eps": report.threat.eps_text,
        "clean_acc": report[NATURAL].overall.value,
        **({"autoattack_acc": report[judged[0]].overall.value} if judged else {}),
        "classwise": {
            "method": _method(trained),
            "attack": {key: info.spec for key, info in report.attacks.items()},
            "robust_acc": strongest.overall.value,
            "worst_class": worst and names[worst.label],
            "worst_class_acc": worst and worst.value,
            "worst_class_interval": worst and [worst.low, worst.high],
            "class_acc": {names[part.label]: part.value for part in strongest.by_class},
            "clean_class_acc": {names[part.label]: part.value for part in report[NATURAL].by_class},
            "cv": strongest.cv,
            "mcd": strongest.mcd,
            "n": report.dataset.n,
            "findings": [finding.code for finding in report.sanity.findings],
        },
    }


def _entry(key: str, reports: list[ReportData], runs: list[int], baseline: str) -> Entry:
    first, results = reports[0], [report[key] for report in reports]
    names = unique_class_names(first.dataset.classes)
    worst = [result.worst for result in results if result.worst is not None]
    settings = {WORST_CASE: " + ".join(_specs(first))} | {name: info.spec for name, info in first.attacks.items()}
    method = _method(_trained(first))
    return Entry(
        model=model_name(first),
        architecture=_architecture(first),
        method=method,
        dataset=f"{first.dataset.name}/{first.dataset.split}",
        n=first.dataset.n,
        threat=f"{first.threat.norm} {first.threat.eps_text}",
        result=key,
        settings=settings.get(key, ""),
        seeds=[_trained(report).get("seed") for report in reports],
        average=_spread([result.overall for result in results]),
        worst=_spread(worst),
        worst_classes=list(dict.fromkeys(names[one.label] for one in worst)),
        cv=_spread([Spread(value=result.cv) for result in results]),
        mcd=_spread([Spread(value=result.mcd) for result in results]),
        baseline=method == baseline,
        runs=runs,
    )


def _against(entry: Entry, entries: Sequence[Entry]) -> Entry:
    """Return the entry with rho against the baseline of the same architecture, data, threat and attack."""
    own, others = _comparable(entry), () if entry.baseline else entries
    base = next((other for other in others if other.baseline and _comparable(other) == own), None)
    if base is None:
        return entry
    value = rounded_rho((entry.average.value, entry.worst.value), (base.average.value, base.worst.value))
    return entry.model_copy(update={"rho": value})


def _comparable(entry: Entry) -> tuple[Any, ...]:
    return entry.architecture, entry.dataset, entry.n, entry.threat, entry.result, entry.settings


def _same_but_for_the_seed(report: ReportData, number: int) -> str:
    trained = {name: value for name, value in _trained(report).items() if name != "seed"}
    same = [trained, report.dataset.digest, report.dataset.n, report.threat.eps_text, _specs(report)]
    return digest_json(same) if trained else str(number)


def _specs(report: ReportData) -> list[str]:
    return [info.spec for info in report.attacks.values()]


def model_name(report: ReportData) -> str:
    """Return the name of the recipe, else of the weights, else of the model."""
    weights = report.model.get("weights")
    return str(_trained(report).get("name", report.name if weights is None else Path(str(weights)).stem))


def _architecture(report: ReportData) -> str:
    given = report.model.get("spec", ABSENT) if "weights" in report.model else ABSENT
    return str(_trained(report).get("model", given))


def _method(trained: Mapping[str, Any]) -> str:
    """Return objective, policy and repair, as ``trades + wat + bias repair``; the uniform policy is omitted."""
    objective, policy, repaired = (_name(trained.get(part)) for part in ("objective", "policy", "repaired"))
    parts = [objective, policy, repaired and f"{repaired} repair"]
    return " + ".join(part for part in parts if part not in ("", "uniform")) or ABSENT


def _name(part: Any) -> str:
    return str(part.get("name", "")) if isinstance(part, Mapping) else str(part or "")


def _trained(report: ReportData) -> Mapping[str, Any]:
    """Return the record of the training; empty if the report has none."""
    found = report.model.get("trained")
    return found if isinstance(found, Mapping) else {}


def _spread(parts: Sequence[Interval]) -> Spread:
    known = [part.value for part in parts if part.value is not None]
    if len(parts) == 1:
        return Spread(value=parts[0].value, low=parts[0].low, high=parts[0].high)
    return Spread(
        value=rounded(statistics.fmean(known)) if known else None,
        sd=rounded(statistics.stdev(known)) if len(known) > 1 else None,
    )
