"""Does the compiled engine in bfloat16 learn what the eager one learns in float32? Several seeds of both, by class.

    python benchmarks/learning.py --out runs/learning
    python benchmarks/learning.py --recipe digits/trades --out runs/learning -o epochs=10

A short training on a part of the images, whose learning rate rises and falls: where it stays high, what the last steps
did decides, and seeds differ by more than anything else. Judged is the last epoch, by PGD-20 on all test images. What
is finished is kept: a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import classwise as cw
from classwise.cli.console import ConsoleProgress
from classwise.config.recipes import Recipe, load_recipe, parse_overrides

WAYS: Mapping[str, Mapping[str, Any]] = {
    "compiled": {"engine": "compiled", "precision": "bf16"},
    "eager": {"engine": "eager", "precision": "fp32"},
}
SHORT: Mapping[str, Any] = {"epochs": 6, "data.per_class": 1250, "schedule": "cyclic"}
ATTACK = "pgd:steps=20"


def learned(root: Path, recipe: Recipe, seeds: list[int], workers: int) -> list[cw.ClassReport]:
    """One report for each seed, of runs that are made where they are missing."""
    runs = {root / f"seed-{seed}": load_recipe(recipe, {"seed": seed}) for seed in seeds}
    missing: dict[str | Path, str | Path | Recipe] = {out: run for out, run in runs.items() if not _ended(out)}
    if missing:
        resume = any(map(Path.exists, runs))
        cw.train_together(missing, resume=resume, workers=workers, progress=ConsoleProgress())
    return [
        cw.evaluate(
            f"{out}@last",
            recipe.data.name,
            attacks=[ATTACK],
            eps=recipe.eps,
            norm=recipe.norm,
            out=out / "last",
            resume=(out / "last").exists(),
            progress=ConsoleProgress(),
        )
        for out in runs
    ]


def _ended(run: Path) -> bool:
    return (run / "checkpoints" / "last.safetensors").exists()


def table(reports: Mapping[str, list[cw.ClassReport]]) -> str:
    """The averages of every seed, and what each class has over the seeds."""
    rows = [["", "natural by seed", "PGD-20 by seed", "every class, mean ± standard deviation"]]
    rows.append(["---"] * len(rows[0]))
    for way, own in reports.items():
        averages = [" ".join(f"{one[key].overall.value:.1f}" for one in own) for key in ("natural", "pgd")]
        rows.append([way, *averages, ", ".join(f"{mean(values):.1f} ± {stdev(values):.1f}" for values in classes(own))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def classes(reports: list[cw.ClassReport]) -> list[list[float]]:
    """For each class what it holds under attack in every seed."""
    return [list(values) for values in zip(*([one.value for one in r["pgd"].by_class] for r in reports), strict=True)]


def apart(one: list[float], other: list[float]) -> float:
    """By how many standard errors two means differ (Welch's t)."""
    error = sqrt(stdev(one) ** 2 / len(one) + stdev(other) ** 2 / len(other))
    difference = abs(mean(one) - mean(other))
    return difference / error if error else 0.0 if not difference else float("inf")


def main() -> None:
    """Train, attack, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="cifar10/trades")
    parser.add_argument("-o", "--override", action="append", default=[], help="key=value of the recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time, in processes of their own")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    asked = parser.parse_args()
    if len(asked.seeds) < 2:
        parser.error("one seed has no spread: give two or more")
    settings = {**SHORT, **parse_overrides(asked.override)}
    recipes = {way: load_recipe(asked.recipe, {**settings, **WAYS[way]}) for way in asked.ways}
    reports = {way: learned(asked.out / way, recipe, asked.seeds, asked.workers) for way, recipe in recipes.items()}
    print(table(reports))
    if len(reports) == 2:
        one, other = (classes(own) for own in reports.values())
        far = [apart(*pair) for pair in zip(one, other, strict=True)]
        print("standard errors between the two, class by class: " + " ".join(f"{value:.1f}" for value in far))


if __name__ == "__main__":
    main()
