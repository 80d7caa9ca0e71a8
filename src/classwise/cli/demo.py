"""``classwise demo``: the whole story on scikit-learn's digits, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli import compare as compare_command
from classwise.cli.console import ConsoleProgress, guarded, say, say_json
from classwise.reporting import Comparison
from classwise.reporting.comparison import Row
from classwise.reporting.formatting import SIGNIFICANT, interval, number, p_text, percent, signed

EPS = "0.2"
ATTACKS = ("pgd:steps=20", "temperature-pgd:inv_t=5")
METHODS = {"TRADES": "trades", "standard": "standard", "Madry": "madry", "WAT": "wat"}
"""Name on the page to recipe. TRADES comes first, because WAT is TRADES with class weights: its baseline."""
REPAIRED = "TRADES, repaired"


@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the runs and the page.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of training and attacks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train four models on digits, repair one, attack and compare them class by class, write the page. Resumable."""
    import classwise
    from classwise.reporting.pages import comparison_page
    from classwise.storage.files import write_text

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
    classwise.repair(
        str(out / METHODS["TRADES"]),
        "digits",
        out=out / "repaired",
        evaluate=False,
        seed=seed,
        device="cpu",
        resume=True,
        progress=progress,
    )
    reports.append(
        classwise.evaluate(
            str(out / "repaired"),
            "digits",
            attacks=ATTACKS,
            eps=EPS,
            seed=seed,
            device="cpu",
            out=out / "repaired",
            resume=True,
            progress=progress,
        )
    )
    comparison = classwise.compare(*reports, names=[*METHODS, REPAIRED])
    page = out / "index.html"
    links = {name: f"{recipe}/report.html" for name, recipe in METHODS.items()}
    links[REPAIRED] = "repaired/report.html"
    title = "Which digit would an attacker pick?"
    write_text(page, comparison_page(comparison, title=title, story=story(comparison), links=links))
    if as_json:
        say_json(comparison.model_dump(mode="json", by_alias=True))
        return
    compare_command.show(comparison)
    say(f"\npage: {page.resolve()}")


def story(comparison: Comparison) -> list[str]:
    """What happened, for a stranger: from the numbers, and no further than they carry."""
    untouched = sorted(row.overall.value or 0.0 for row in comparison["natural"])
    rows = {row.model: row for row in comparison[comparison.strongest]}
    standard, madry, trades, wat = (rows[name] for name in ("standard", "Madry", "TRADES", "WAT"))
    return [
        f"Four networks learned to read 8 × 8 digits and get {number(untouched[0])} to {number(untouched[-1])}% of "
        f"{comparison.dataset.n} new ones right. Then an attacker who knows the network may change every pixel by up "
        f"to {EPS} of its range. After standard training {percent(standard.overall.value)} survive.",
        _hole(madry),
        _filled(madry, trades),
        _gained(
            trades,
            wat,
            "WAT is TRADES with more weight on the classes that do badly in validation. Its weakest digit is",
        ),
        _gained(
            trades,
            rows[REPAIRED],
            "A repair adds a constant to the logit of each digit, fitted to the validation images of TRADES in "
            "seconds, without training. The weakest digit is then",
        ),
    ]


def _hole(madry: Row) -> str:
    worst = madry.worst
    assert worst is not None
    return (
        f"Adversarial training (Madry) holds {percent(madry.overall.value)}, an average that hides a hole: of the "
        f"{worst.name}s only {percent(worst.value)} survive ({interval(worst.low, worst.high)}). That is the digit an "
        "attacker would pick."
    )


def _filled(madry: Row, trades: Row) -> str:
    hole, worst = madry.worst, trades.worst
    assert hole is not None
    assert worst is not None
    # The changes are against TRADES, so what Madry lost there is what TRADES holds.
    change = next(part for part in madry.changes if part.label == hole.label)
    told = "the difference is significant" if change.p_value < SIGNIFICANT else "the difference is not significant"
    held = f"With TRADES {percent(trades.shares[hole.label])} of the {hole.name}s survive"
    now = "It is still the weakest digit."
    if worst.label != hole.label:
        now = f"Its weakest digit is the {worst.name}, at {percent(worst.value)} ({interval(worst.low, worst.high)})."
    return f"{held}; {told} ({p_text(change.p_value)}). {now}"


def _gained(trades: Row, other: Row, opening: str) -> str:
    before, after, change = trades.worst, other.worst, other.change
    assert before is not None
    assert after is not None
    assert change is not None
    apart = after.low > before.high and after.corrected.low > before.corrected.high
    proof = f"But {before.n} images of a digit leave intervals that overlap: this run alone does not prove the gain."
    if apart:
        proof = "The intervals of the two do not overlap."
    elif after.value <= before.value:
        proof = f"So this run shows no gain, and {before.n} images of a digit cannot tell a few points from none."
    return (
        f"{opening} the {after.name}, at {percent(after.value)} ({interval(after.low, after.high)}): "
        f"{signed(after.value - before.value)} points in the worst class and {signed(change.points)} on average, so "
        f"rho is {signed(other.rho, 2)}. {proof}"
    )
