"""All methods on digits over several seeds: natural and robust accuracy, average and worst class, relative to TRADES.

    python benchmarks/digits_study.py --out runs/study --workers 2

Finished runs are reused, so a second call continues. The table is printed and written to OUT/study.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

EPS = "0.2"
ATTACKS = ("pgd:steps=20", "temperature-pgd:inv_t=2+5+10+50")
FIRST = ("standard", "trades")
"""Trained first: other methods start from them or are labeled by them."""


def finished(out: Path) -> dict[str, Any] | None:
    """Return the report of a finished run."""
    path = out / "report.json"
    return json.loads(path.read_text()) if path.exists() else None


def make(root: Path, method: str, seed: int) -> None:
    """Train and evaluate one model."""
    import torch

    import classwise as cw
    from classwise.config.recipes import load_recipe

    torch.set_num_threads(1)
    out = root / method / f"seed-{seed}"
    if finished(out) is not None:
        return
    recipe = load_recipe(f"digits/{method}")
    changes: dict[str, Any] = {"seed": seed}
    if recipe.start is not None:
        changes["start"] = str(root / "trades" / f"seed-{seed}")
    if "teacher" in recipe.objective:
        changes["objective.teacher"] = str(root / "trades" / f"seed-{seed}")
    if recipe.data.labeler is not None:
        changes["data.labeler"] = str(root / "standard" / f"seed-{seed}")
    cw.train(recipe, out=out, resume=(out / "run.json").exists(), **changes)
    cw.evaluate(str(out), "digits", attacks=ATTACKS, eps=EPS, seed=seed, out=out)


def rows(root: Path, methods: list[str], seeds: list[int]) -> list[list[str]]:
    """Return one row per method with mean and standard deviation over the seeds."""
    reports = {m: [r for s in seeds if (r := finished(root / m / f"seed-{s}"))] for m in methods}
    made = []
    for method in sorted(methods, key=lambda m: -_mean([_of(r, "pgd", "worst") for r in reports[m]])):
        own = reports[method]
        if not own:
            continue
        rho = [_rho(r, b) for r, b in zip(own, reports["trades"], strict=False)]
        columns = [[_of(r, attack, what) for r in own] for attack, what in COLUMNS]
        made.append([method, *map(_spread, columns), "–" if method == "trades" else _spread(rho, 2)])
    return made


COLUMNS = (
    ("natural", "overall"),
    ("natural", "worst"),
    ("pgd", "overall"),
    ("pgd", "worst"),
    ("pgd", "cv"),
    ("pgd", "mcd"),
    ("temperature-pgd", "overall"),
    ("temperature-pgd", "worst"),
)
HEADER = ["method", *(f"{attack} {what}" for attack, what in COLUMNS), "rho"]


def _of(report: dict[str, Any], attack: str, what: str) -> float:
    key = next(name for name in report["results"] if name.split(":")[0] == attack)
    value = report["results"][key][what]
    return float(value["value"] if isinstance(value, dict) else value)


def _rho(report: dict[str, Any], baseline: dict[str, Any]) -> float:
    from classwise.metrics import rho

    worst, average = (_of(report, "pgd", what) for what in ("worst", "overall"))
    base_worst, base_average = (_of(baseline, "pgd", what) for what in ("worst", "overall"))
    value = rho(average=average, worst=worst, baseline_average=base_average, baseline_worst=base_worst)
    return float("nan") if value is None else value


def _mean(values: list[float]) -> float:
    return statistics.mean(values) if values else float("-inf")


def _spread(values: list[float], digits: int = 1) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def main() -> None:
    """Train and evaluate all methods and print the table."""
    from classwise.config.recipes import recipe_names

    every = [name.removeprefix("digits/") for name in recipe_names() if name.startswith("digits/")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=every)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    methods = [*FIRST, *(m for m in given.methods if m not in FIRST)]
    with ProcessPoolExecutor(given.workers) as pool:
        for part in (FIRST, methods[len(FIRST) :]):
            jobs = {pool.submit(make, given.out, m, seed): (m, seed) for seed in given.seeds for m in part}
            for job in as_completed(jobs):
                error = job.exception()
                print(*jobs[job], "done" if error is None else f"failed: {error}", flush=True)
    table = [HEADER, ["---"] * len(HEADER), *rows(given.out, methods, given.seeds)]
    text = "\n".join("| " + " | ".join(row) + " |" for row in table)
    (given.out / "study.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
