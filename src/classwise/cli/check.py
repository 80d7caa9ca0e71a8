"""``classwise check``: the gate for continuous integration."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import guarded, say, say_json, table
from classwise.core.errors import InputError
from classwise.reporting import ClassReport, load_report
from classwise.reporting import compare as compare_reports
from classwise.reporting.check_output import COLUMNS, junit, rows, workflow_commands
from classwise.reporting.gate import Check, no_findings, no_worse_than, thresholds
from classwise.storage.files import write_text


@guarded
def check(
    run: Annotated[Path, typer.Argument(help="Run directory with a report.")],
    min_worst: Annotated[float | None, typer.Option(help="Least accuracy of the worst class, %.")] = None,
    min_average: Annotated[float | None, typer.Option(help="Least overall accuracy, %.")] = None,
    min_class: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS=%", help="Least accuracy of a class, by name or label; may be repeated."),
    ] = None,
    max_mcd: Annotated[float | None, typer.Option(help="Largest gap between classes, points.")] = None,
    max_cv: Annotated[float | None, typer.Option(help="Largest variance between classes, percent².")] = None,
    confident: Annotated[
        bool, typer.Option("--confident", help="Limits must hold at the end of the 95% interval, too.")
    ] = False,
    no_worse: Annotated[
        Path | None,
        typer.Option("--no-worse-than", help="Run directory of the baseline; paired test per class."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Error rate of the paired tests.")] = 0.05,
    attack: Annotated[str | None, typer.Option(help="Which result to judge. [default: worst-case]")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="SEVERITY", help="Fail on findings about the evaluation itself: info, warning or error."),
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the outcome as JUnit XML.")
    ] = None,
    github: Annotated[
        bool | None,
        typer.Option("--github/--no-github", help="Annotate the workflow run. [default: where GITHUB_ACTIONS is true]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Pass or fail a model by its worst class. Exit code 1 where a check fails."""
    if junit_file is not None and junit_file.is_dir():
        raise InputError(f"{junit_file} is a directory: --junit names a file")
    report = load_report(run)
    key = attack or report.strongest
    outcomes = thresholds(
        report,
        key,
        min_worst=min_worst,
        min_average=min_average,
        min_class=min_class or (),
        max_mcd=max_mcd,
        max_cv=max_cv,
        confident=confident,
    )
    outcomes += [] if no_worse is None else _against(no_worse, report, run, key, alpha)
    outcomes += [] if fail_on is None else no_findings(report, fail_on)
    if not outcomes:
        raise InputError(
            "nothing to check: give --min-worst, --min-average, --min-class, --max-mcd, --max-cv, --no-worse-than or "
            "--fail-on"
        )
    if junit_file is not None:
        write_text(junit_file, junit(outcomes))
    annotate = os.environ.get("GITHUB_ACTIONS") == "true" if github is None else github
    passed = all(outcome.passed for outcome in outcomes)
    if as_json:
        say_json({"passed": passed, "checks": [outcome.model_dump(mode="json") for outcome in outcomes]})
    elif annotate:
        # Names come from outside, and a line that looks like a command would be one.
        token = secrets.token_hex(16)
        say(f"::stop-commands::{token}")
        table("", COLUMNS, rows(outcomes), numbers=False)
        say(f"::{token}::")
    else:
        table("", COLUMNS, rows(outcomes), numbers=False)
    if annotate:
        # The runner reads both streams; with --json standard output belongs to the program that reads it.
        print("\n".join(workflow_commands(outcomes)), file=sys.stderr if as_json else sys.stdout)
    if not passed:
        raise typer.Exit(1)


def _against(baseline: Path, report: ClassReport, run: Path, key: str, alpha: float) -> list[Check]:
    comparison = compare_reports(load_report(baseline), report, names=[str(baseline), str(run)])
    return no_worse_than(comparison, key, alpha)
