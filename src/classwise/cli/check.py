"""``classwise check``: the gate for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import guarded, say, say_json
from classwise.errors import InputError
from classwise.reporting import ClassReport, load_report
from classwise.reporting import compare as compare_reports
from classwise.reporting.gate import Check, no_findings, no_worse_than, thresholds


@guarded
def check(
    run: Annotated[Path, typer.Argument(help="Run directory with a report.")],
    min_worst: Annotated[float | None, typer.Option(help="Least accuracy of the worst class, %.")] = None,
    min_average: Annotated[float | None, typer.Option(help="Least overall accuracy, %.")] = None,
    max_mcd: Annotated[float | None, typer.Option(help="Largest gap between classes, points.")] = None,
    no_worse: Annotated[
        Path | None,
        typer.Option("--no-worse-than", help="Run directory of the baseline; paired test per class."),
    ] = None,
    attack: Annotated[str | None, typer.Option(help="Which result to judge. [default: worst-case]")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="SEVERITY", help="Fail on findings about the evaluation itself: info, warning or error."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Error rate of the paired tests.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Pass or fail a model by its worst class. Exit code 1 where a check fails."""
    report = load_report(run)
    key = attack or report.strongest
    outcomes = thresholds(report, key, min_worst=min_worst, min_average=min_average, max_mcd=max_mcd)
    outcomes += [] if no_worse is None else _against(no_worse, report, run, key, alpha)
    outcomes += [] if fail_on is None else no_findings(report, fail_on)
    if not outcomes:
        raise InputError("nothing to check: give --min-worst, --min-average, --max-mcd, --no-worse-than or --fail-on")
    passed = all(outcome.passed for outcome in outcomes)
    if as_json:
        say_json({"passed": passed, "checks": [outcome.model_dump() for outcome in outcomes]})
    else:
        for outcome in outcomes:
            say(f"{'ok    ' if outcome.passed else 'FAILED'}  {outcome.text}")
    if not passed:
        raise typer.Exit(1)


def _against(baseline: Path, report: ClassReport, run: Path, key: str, alpha: float) -> list[Check]:
    comparison = compare_reports(load_report(baseline), report, names=[str(baseline), str(run)])
    return no_worse_than(comparison, key, alpha)
