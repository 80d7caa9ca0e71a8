"""``classwise compare``: models side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from classwise.cli.console import check_output, estimate, number, say, say_json, table
from classwise.cli.parameters import Figures, Json, output

if TYPE_CHECKING:
    from classwise.reporting import Comparison


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories with reports; the first is the baseline.", metavar="RUN")
    ],
    out: Annotated[Path | None, output("Write the page to this file.", "FILE")] = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Compare runs with a baseline: average, worst class, class variance (CV), maximum class difference (MCD), rho
    (relative gain of the worst class minus relative loss of the average), paired tests.

    Examples:
      classwise compare runs/trades runs/wat --out comparison.html
    """
    from classwise.reporting import compare
    from classwise.reporting.charts import save_figures

    check_output(out, "--out", "file")
    comparison = compare(*runs)
    if out is not None:
        comparison.to_html(out)
    if figures is not None:
        save_figures(comparison, figures)
    if as_json:
        say_json(comparison.model_dump(mode="json", by_alias=True))
        return
    show(comparison)
    if out is not None:
        say(f"\npage: {out}")


def show(comparison: Comparison) -> None:
    """Print one table per result, then the findings in words."""
    from classwise.reporting.wording import comparison_facts, comparison_verdict

    for key, rows in comparison.results.items():
        table(
            key,
            ["model", "average [95%]", "worst class", "worst [95%]", "CV", "MCD", "rho", "change", "p"],
            [
                [
                    row.model,
                    estimate(row.overall),
                    row.worst.name if row.worst else "–",
                    estimate(row.worst),
                    number(row.cv),
                    number(row.mcd),
                    number(row.rho, 3),
                    f"{row.change.points:+.1f}" if row.change else "–",
                    f"{row.change.p_value:.2g}" if row.change else "–",
                ]
                for row in rows
            ],
        )
        say("")
    say(
        "CV: variance of the class accuracies; MCD: highest minus lowest class accuracy; rho: relative gain of the "
        "worst class minus relative loss of the average; change: average against the baseline, points; p: paired test\n"
    )
    say(comparison_verdict(comparison))
    for name, fact in comparison_facts(comparison):
        say(f"{name}: {fact}")
