"""Training with the compiled engine in bfloat16 and the eager one in float32: accuracy by class over several seeds.

    python benchmarks/learning.py --out runs/learning
    python benchmarks/learning.py --recipe digits/trades --out runs/learning -o epochs=10

Training is short, on a subset of the images, with a cyclic learning rate; with a constant high rate, the result depends
on the last steps and the seeds differ too much. The last epoch is evaluated by PGD-20 on all test images. Finished runs
are reused, so a second call continues.
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
    """Return one report per seed; missing runs are trained."""
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
    """Return a table with the averages of every seed, and each class over the seeds."""
    rows = [["", "natural by seed", "PGD-20 by seed", "every class, mean ± standard deviation"]]
    rows.append(["---"] * len(rows[0]))
    for way, own in reports.items():
        averages = [" ".join(f"{one[key].overall.value:.1f}" for one in own) for key in ("natural", "pgd")]
        rows.append([way, *averages, ", ".join(f"{mean(values):.1f} ± {stdev(values):.1f}" for values in classes(own))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def classes(reports: list[cw.ClassReport]) -> list[list[float]]:
    """Return the robust accuracies of each class by seed."""
    return [list(values) for values in zip(*([one.value for one in r["pgd"].by_class] for r in reports), strict=True)]


def standard_errors(one: list[float], other: list[float]) -> float:
    """Return the difference of two means in standard errors (Welch's t)."""
    error = sqrt(stdev(one) ** 2 / len(one) + stdev(other) ** 2 / len(other))
    difference = abs(mean(one) - mean(other))
    return difference / error if error else 0.0 if not difference else float("inf")


def main() -> None:
    """Train, evaluate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="cifar10/trades")
    parser.add_argument("-o", "--override", action="append", default=[], help="recipe setting as key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="number of processes, each of which trains one seed")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    given = parser.parse_args()
    if len(given.seeds) < 2:
        parser.error("one seed has no standard deviation: give two or more")
    settings = {**SHORT, **parse_overrides(given.override)}
    recipes = {way: load_recipe(given.recipe, {**settings, **WAYS[way]}) for way in given.ways}
    reports = {way: learned(given.out / way, recipe, given.seeds, given.workers) for way, recipe in recipes.items()}
    print(table(reports))
    if len(reports) == 2:
        one, other = (classes(own) for own in reports.values())
        far = [standard_errors(*pair) for pair in zip(one, other, strict=True)]
        print("difference in standard errors, by class: " + " ".join(f"{value:.1f}" for value in far))


if __name__ == "__main__":
    main()
