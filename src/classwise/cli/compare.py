"""``classwise compare``: models side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import estimate, guarded, number, say, say_json, table
from classwise.core.errors import InputError
from classwise.reporting import Comparison
from classwise.reporting import compare as compare_reports
from classwise.reporting.charts import save_figures
from classwise.reporting.wording import comparison_facts, comparison_verdict


@guarded
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the first is the baseline.")],
    out: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw the charts as SVG and PNG into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare runs with the first of them: average, worst class, CV, MCD, rho, paired tests."""
    if out is not None and out.is_dir():
        raise InputError(f"{out} is a directory: --out names the page's file")
    comparison = compare_reports(*runs)
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
    """One table per result, then what it means in words."""
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
    say(comparison_verdict(comparison))
    for name, fact in comparison_facts(comparison):
        say(f"{name}: {fact}")
