"""``classwise check``: pass or fail for continuous integration."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import check_output, say, say_json, table
from classwise.cli.parameters import Json, limit, output
from classwise.core.errors import InputError


def check(
    run: Annotated[Path, typer.Argument(help="Run directory with a report.", metavar="RUN")],
    min_worst: Annotated[float | None, limit("Minimum accuracy of the worst class, %.")] = None,
    min_average: Annotated[float | None, limit("Minimum average accuracy, %.")] = None,
    min_class: Annotated[
        list[str] | None, limit("Minimum accuracy of a class, by name or label. Repeatable.", "CLASS=N")
    ] = None,
    max_mcd: Annotated[
        float | None, limit("Maximum class difference (MCD: highest minus lowest class accuracy), percentage points.")
    ] = None,
    max_cv: Annotated[
        float | None, limit("Maximum class variance (CV: variance of the class accuracies), percent².")
    ] = None,
    no_worse: Annotated[
        Path | None,
        limit(
            "Run directory of a baseline; fails if a paired test finds a loss in a class or on average.",
            "RUN",
            "--no-worse-than",
        ),
    ] = None,
    fail_on: Annotated[
        str | None, limit("Fail on trust findings of this severity or higher: info, warning or error.", "SEVERITY")
    ] = None,
    confident: Annotated[
        bool,
        limit("Also require limits to hold at the less favorable end of the 95% interval.", None, "--confident"),
    ] = False,
    alpha: Annotated[float, limit("Significance level of the paired tests.", "P")] = 0.05,
    attack: Annotated[
        str | None, limit("Attack whose result is checked. [default: worst-case, the minimum over all attacks]", "NAME")
    ] = None,
    junit_file: Annotated[Path | None, output("Write the outcome as JUnit XML.", "FILE", "--junit")] = None,
    github: Annotated[
        bool | None,
        output("Annotate the GitHub workflow run. [default: if GITHUB_ACTIONS is true]", None, "--github/--no-github"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check an evaluated model against limits or a baseline; exit code 1 if a check fails.

    Examples:
      classwise check runs/wat --min-worst 20
      classwise check runs/wat --min-worst 20 --confident --no-worse-than runs/trades --junit checks.xml
    """
    from classwise.reporting import compare, load_report
    from classwise.reporting.check_output import COLUMNS, junit, rows, workflow_commands
    from classwise.reporting.gate import check_level, no_findings, no_worse_than, thresholds
    from classwise.storage.files import write_text

    check_output(junit_file, "--junit", "file")
    check_level(alpha)  # also without --no-worse-than
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
    if no_worse is not None:
        comparison = compare(load_report(no_worse), report, names=[str(no_worse), str(run)])
        outcomes += no_worse_than(comparison, key, alpha)
    if fail_on is not None:
        outcomes += no_findings(report, fail_on)
    if not outcomes:
        raise InputError(
            "nothing to check: pass --min-worst, --min-average, --min-class, --max-mcd, --max-cv, --no-worse-than or "
            "--fail-on"
        )
    if junit_file is not None:
        write_text(junit_file, junit(outcomes))
    annotate = os.environ.get("GITHUB_ACTIONS") == "true" if github is None else github
    passed = all(outcome.passed for outcome in outcomes)
    # Class names are untrusted: GitHub must not parse a line of the table as a workflow command.
    token = secrets.token_hex(16) if annotate and not as_json else None
    if as_json:
        say_json({"passed": passed, "checks": [outcome.model_dump(mode="json") for outcome in outcomes]})
    else:
        if token is not None:
            say(f"::stop-commands::{token}")
        table("", COLUMNS, rows(outcomes), numbers=False)
        if token is not None:
            say(f"::{token}::")
    if annotate:
        # GitHub reads both streams; with --json standard output contains nothing else.
        print("\n".join(workflow_commands(outcomes)), file=sys.stderr if as_json else sys.stdout)
    if not passed:
        raise typer.Exit(1)
