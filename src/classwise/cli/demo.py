"""``classwise demo``: train, repair, evaluate and compare on scikit-learn's digits, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from classwise.cli import compare as compare_command
from classwise.cli.console import ConsoleProgress, say, say_json
from classwise.cli.parameters import Json, option, output

EPS = "0.2"
ATTACKS = ("pgd:steps=20", "temperature-pgd:inv_t=5")
METHODS = {"TRADES": "trades", "standard": "standard", "Madry": "madry", "WAT": "wat"}
"""Name on the page to recipe. TRADES is first, as the baseline of WAT: WAT is TRADES with class weights."""
REPAIRED = "repaired TRADES"


def demo(
    out: Annotated[Path, output("Directory for the runs and the page.")] = Path("demo"),
    seed: Annotated[int, option("Random seed of training and attacks.", "N")] = 0,
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
    write_text(page, comparison_page(comparison, title=title, links=links))
    if as_json:
        say_json(comparison.model_dump(mode="json", by_alias=True))
        return
    compare_command.show(comparison)
    say(f"\npage: {page.resolve()}")
