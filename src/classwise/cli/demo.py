"""``classwise demo``: train, repair, evaluate and compare on scikit-learn's digits, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from classwise.cli import compare as compare_command
from classwise.cli.console import ConsoleProgress, guarded, say, say_json
from classwise.cli.parameters import Json

if TYPE_CHECKING:
    from classwise.reporting import Comparison
    from classwise.reporting.comparison import Row

EPS = "0.2"
ATTACKS = ("pgd:steps=20", "temperature-pgd:inv_t=5")
METHODS = {"TRADES": "trades", "standard": "standard", "Madry": "madry", "WAT": "wat"}
"""Name on the page to recipe. TRADES is first, as the baseline of WAT: WAT is TRADES with class weights."""
REPAIRED = "TRADES, repaired"


@guarded
def demo(
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the runs and the page.", metavar="DIR", show_default=True, rich_help_panel="Output"
        ),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Random seed of training and attacks.", metavar="N", show_default=True)] = 0,
    as_json: Json = False,
) -> None:
    """Train four models on digits, repair one, compare all five class by class, and write a page.

    Needs no download. The same command continues an interrupted demo.

    Examples:
      classwise demo --out demo
    """
    import classwise
    from classwise.reporting.pages import comparison_page
    from classwise.storage.files import write_text

    common: dict[str, Any] = {"seed": seed, "device": "cpu", "resume": True, "progress": ConsoleProgress()}
    for recipe in METHODS.values():
        classwise.train(f"digits/{recipe}", out=out / recipe, **common)
    original = str(out / METHODS["TRADES"])
    classwise.repair(original, "digits", out=out / "repaired", evaluate=False, **common)
    folders = {**METHODS, REPAIRED: "repaired"}
    reports = [
        classwise.evaluate(str(out / folder), "digits", attacks=ATTACKS, eps=EPS, out=out / folder, **common)
        for folder in folders.values()
    ]
    comparison = classwise.compare(*reports, names=list(folders))
    page = out / "index.html"
    links = {name: f"{folder}/report.html" for name, folder in folders.items()}
    title = "Robustness of each digit under attack"
    write_text(page, comparison_page(comparison, title=title, story=story(comparison), links=links))
    if as_json:
        say_json(comparison.model_dump(mode="json", by_alias=True))
        return
    compare_command.show(comparison)
    say(f"\npage: {page.resolve()}")


def story(comparison: Comparison) -> list[str]:
    """Describe the results in a few sentences, each as strong as its intervals and tests allow."""
    from classwise.reporting.formatting import number, percent

    natural = sorted(row.overall.value or 0.0 for row in comparison["natural"])
    rows = {row.model: row for row in comparison[comparison.strongest]}
    trades = rows["TRADES"]
    return [
        f"Four networks classify 8 × 8 images of digits. Without attack, they are correct on {number(natural[0])} to "
        f"{number(natural[-1])}% of {comparison.dataset.n} test images. The attack may change every pixel by up to "
        f"{EPS}. After standard training {percent(rows['standard'].overall.value)} of the images stay correct "
        "under attack.",
        _worst_of_madry(rows["Madry"]),
        _worst_of_trades(rows["Madry"], trades),
        _gain(trades, rows["WAT"], "WAT is TRADES with larger weights for classes of high validation loss."),
        _gain(
            trades,
            rows[REPAIRED],
            "The repair adds one constant per class to the logits of TRADES, fitted to validation images in seconds.",
        ),
    ]


def _worst_of_madry(madry: Row) -> str:
    from classwise.reporting.formatting import percent

    return (
        f"After adversarial training (Madry) {percent(madry.overall.value)} stay correct on average; the weakest digit "
        f"is {_worst(madry)}."
    )


def _worst_of_trades(madry: Row, trades: Row) -> str:
    from classwise.reporting.formatting import SIGNIFICANT, p_text, percent

    before, worst = madry.worst, trades.worst
    assert before is not None
    assert worst is not None
    # Changes are against TRADES, the baseline.
    change = next(part for part in madry.changes if part.label == before.label)
    difference = "a significant difference" if change.p_value < SIGNIFICANT else "not a significant difference"
    weakest = "It is still the weakest digit."
    if worst.label != before.label:
        weakest = f"Its weakest digit is {_worst(trades)}."
    return (
        f"After TRADES {percent(trades.shares[before.label])} of the {before.name}s stay correct, {difference} "
        f"({p_text(change.p_value)}). {weakest}"
    )


def _gain(trades: Row, other: Row, method: str) -> str:
    from classwise.reporting.formatting import signed

    before, after, change = trades.worst, other.worst, other.change
    assert before is not None
    assert after is not None
    assert change is not None
    evidence = f"With {before.n} images of the digit the two intervals overlap: this run alone does not prove a gain."
    if after.low > before.high and after.corrected.low > before.corrected.high:
        evidence = "The two intervals do not overlap."
    elif after.value <= before.value:
        evidence = f"This run shows no gain; {before.n} images of the digit are too few to detect a few points."
    return (
        f"{method} Its weakest digit is {_worst(other)}: {signed(after.value - before.value)} points in the worst "
        f"class, {signed(change.points)} on average, rho {signed(other.rho, 2)}. {evidence}"
    )


def _worst(row: Row) -> str:
    from classwise.reporting.formatting import interval, percent

    worst = row.worst
    assert worst is not None
    return f"the {worst.name}, {percent(worst.value)} ({interval(worst.low, worst.high)})"
