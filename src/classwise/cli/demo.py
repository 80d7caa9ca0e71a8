"""``classwise demo``: the whole story on scikit-learn's digits, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli import compare as compare_command
from classwise.cli.console import ConsoleProgress, guarded, say
from classwise.reporting import Comparison
from classwise.reporting.story import LEVEL, interval, number, p_text, percent, signed

EPS = "0.2"
ATTACKS = ("pgd:steps=20", "temperature-pgd:inv_t=5")
METHODS = {"TRADES": "trades", "standard": "standard", "Madry": "madry", "WAT": "wat"}
"""Name on the page to recipe. TRADES comes first, because WAT is TRADES with class weights: its baseline."""


@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the four runs and the page.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of training and attacks.")] = 0,
) -> None:
    """Train four models on digits, attack them, compare them class by class and write the page. Can be resumed."""
    import classwise
    from classwise.files import write_text
    from classwise.reporting.pages import comparison_page

    progress = ConsoleProgress()
    reports = []
    for recipe in METHODS.values():
        run = out / recipe
        classwise.train(f"digits/{recipe}", out=run, seed=seed, resume=True, device="cpu", progress=progress)
        report = classwise.evaluate(
            str(run),
            "digits",
            attacks=ATTACKS,
            eps=EPS,
            seed=seed,
            device="cpu",
            out=run,
            resume=True,
            progress=progress,
        )
        reports.append(report)
    comparison = classwise.compare(*reports, names=list(METHODS))
    page = out / "index.html"
    links = {name: f"{recipe}/report.html" for name, recipe in METHODS.items()}
    title = "Which digit would an attacker pick?"
    write_text(page, comparison_page(comparison, title=title, story=story(comparison), links=links))
    compare_command.show(comparison)
    say(f"\npage: {page.resolve()}")


def story(comparison: Comparison) -> list[str]:
    """What happened, for a stranger: from the numbers, and no further than they carry."""
    natural = {row.model: row for row in comparison["natural"]}
    attacked = {row.model: row for row in comparison[comparison.strongest]}
    standard, madry, trades, wat = (attacked[name] for name in ("standard", "Madry", "TRADES", "WAT"))
    untouched = sorted(row.overall.value or 0.0 for row in natural.values())
    assert madry.worst is not None
    assert trades.worst is not None
    assert wat.worst is not None
    saved = next(change for change in madry.changes if change.label == madry.worst.label)
    lifted = wat.worst.value - trades.worst.value
    told = wat.worst.corrected.low > trades.worst.corrected.high
    assert wat.change is not None
    cost = f"{signed(wat.change.points)} points on average ({p_text(wat.change.p_value)})"
    return [
        f"Four networks learned to read 8 × 8 digits. On {comparison.dataset.n} test images they get "
        f"{number(untouched[0])} to {number(untouched[-1])}% right. Then an attacker may change every pixel by up to "
        f"{EPS} of its range, knowing the network.",
        f"Standard training collapses: {percent(standard.overall.value)} survive.",
        f"Adversarial training (Madry) holds {percent(madry.overall.value)}, an average that hides a hole: of the "
        f"{madry.worst.name}s only {percent(madry.worst.value)} survive ({interval(madry.worst.low, madry.worst.high)}). "
        "That is the digit an attacker would pick.",
        f"TRADES reads the {madry.worst.name} at {percent(trades.shares[madry.worst.label])}"
        + (
            f", which the data prove ({p_text(saved.p_value)})."
            if saved.p_value < LEVEL and saved.points < 0
            else f"; the data cannot tell this from Madry's ({p_text(saved.p_value)})."
        )
        + f" Its weakest digit is now {trades.worst.name} at {percent(trades.worst.value)} "
        f"({interval(trades.worst.low, trades.worst.high)}).",
        "WAT is TRADES with more weight on classes that do badly in validation. Its weakest digit is "
        f"{wat.worst.name} at {percent(wat.worst.value)} ({interval(wat.worst.low, wat.worst.high)}): "
        f"{signed(lifted)} points in the worst class for {cost}; rho = {number(wat.rho, 2)}. "
        + (
            "The intervals do not overlap."
            if told
            else f"With about {trades.worst.n} images a digit the intervals overlap: this run alone does not prove the gain."
        ),
    ]
