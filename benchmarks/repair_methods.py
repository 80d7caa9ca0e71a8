"""Training methods with and without a repair, and all repair methods on the first training method.

For every method and seed: train the recipe, evaluate it with margins, repair it, evaluate the repairs. Reports,
verdicts, margins and repairs, but no weights, are copied to OUT/kept as soon as they exist, so a run can be stopped at
any time. With --minutes, no training run starts that would exceed the time limit. With --weights, a trained model is
repaired instead, on the training split: for methods that use training images.

    python benchmarks/repair_methods.py --data digits --seeds 0,1,2 --out runs/repair-digits
    python benchmarks/repair_methods.py --data cifar10 --methods trades --minutes 9 --out runs/repair-cifar10 \
        -o epochs=60 -o batch_size=512 -o schedule.milestones='[45, 55]' -o ema=0.999

    python benchmarks/repair_methods.py --data cifar10 --model resnet18 --weights trades.safetensors --eps 8/255 \
        --repairs norms,head-sam,retrain --out runs/repair-checkpoint
    python benchmarks/repair_methods.py --from results/repair-digits      # only the table, from kept files
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import classwise as cw
from classwise.config.recipes import load_recipe, parse_overrides
from classwise.core.errors import InputError
from classwise.reporting.repair import RepairReport, load_repair

METHODS = ("trades", "wat", "csl", "cfa", "dafa", "frl-rwrm")
REPAIRS = ("bias", "norms", "head-sam", "finetune:how=spectral", "finetune:how=faal", "retrain")
KEPT = (
    "run.json",
    "report.json",
    "verdicts.parquet",
    "margins.parquet",
    "validation-margins.parquet",
    "validation.json",
    "metrics.jsonl",
    "repair.json",
)


def make(given: argparse.Namespace, method: str, seed: int, first: bool) -> None:
    """Train, evaluate and repair one model; finished parts are reused."""
    recipe = load_recipe(f"{given.data}/{method}")
    changes: dict[str, Any] = {**parse_overrides(given.override), "seed": seed}
    if recipe.start is not None:
        changes["start"] = str(given.out / METHODS[0] / f"seed-{seed}" / "model")
    place = given.out / method / f"seed-{seed}"
    model = place / "model"
    run = cw.train(recipe, out=model, resume=True, **changes)
    eps = run.recipe.eps
    cw.evaluate(model, given.data, attacks=[given.attack], eps=eps, out=model, margins=True, resume=True)
    keep(given.out, model)
    repairs = given.repairs.split(",") if first else ["bias"]
    repair_each(given, place, repairs, seed, model=model)


def repair_each(given: argparse.Namespace, place: Path, repairs: list[str], seed: int, **model: Any) -> None:
    """Repair one model by several methods."""
    evaluated: Path | None = None
    for repair in repairs:
        for name, choice in choices(given, repair):
            out = place / name
            if evaluated is not None and not (out / "original").exists():
                shutil.copytree(evaluated, out / "original")  # the same evaluation of the same model
                (out / "run.json").write_text("{}", encoding="utf-8")  # marks the directory as a run
            try:
                attacks = [given.attack, *given.also]
                cw.repair(
                    data=given.data, method=repair, attacks=attacks, out=out, seed=seed, resume=True, **model, **choice
                )
            except InputError as error:
                print(f"{place.relative_to(given.out)} {name}: {error}")
                continue
            evaluated = evaluated or out / "original"
            keep(given.out, out)


def choices(given: argparse.Namespace, repair: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return the directory name and settings of each repair by one method."""
    name = repair.replace(":", "-").replace("=", "-")
    if repair != "bias":
        return [(name, {})]
    return [("bias-rho", {"rule": "rho"}), *((f"bias-floor-{floor:g}", {"floor": floor}) for floor in given.floors)]


def keep(out: Path, place: Path) -> None:
    """Copy the small files of a run directory to OUT/kept."""
    target = out / "kept" / place.relative_to(out)
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (place / name).is_file():
            shutil.copy2(place / name, target / name)


def table(kept: Path) -> str:
    """Return the average and worst class of every model: mean and standard deviation over the seeds."""
    rows: dict[tuple[str, str], list[RepairReport]] = {}
    for file in sorted(kept.glob("*/seed-*/*/repair.json")):
        report = load_repair(file.parent)
        if report.test is not None:
            repair = ", ".join(filter(None, [f"`{report.method}`", report.choice]))
            rows.setdefault((file.parent.parent.parent.name, repair), []).append(report)
    lines = [
        "| training | repair | average / worst before | after | change | cross-validated (validation) | natural after "
        "| rho | seeds |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (method, repair), reports in rows.items():
        tests = [report.test for report in reports if report.test is not None]
        before = [(one.average_before.value or 0.0, one.worst_before.value or 0.0) for one in tests]
        after = [(one.average_after.value or 0.0, one.worst_after.value or 0.0) for one in tests]
        change = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
        expected = [
            (report.cross_validated.robust.overall.value or 0.0, report.cross_validated.robust.worst.value)
            for report in reports
            if report.cross_validated is not None and report.cross_validated.robust.worst is not None
        ]
        natural = [one.natural_after.value or 0.0 for one in tests]
        rhos = [one.rho for one in tests if one.rho is not None]
        cells = [method, repair, pairs(before), pairs(after), pairs(change, "+"), pairs(expected)]
        cells += [
            f"{statistics.fmean(natural):.1f}",
            f"{statistics.fmean(rhos):+.2f}" if rhos else "–",
            str(len(tests)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs(values: list[tuple[float, float]], sign: str = "") -> str:
    """Format the means of average / worst class, with standard deviations over several seeds."""
    if not values:
        return "–"
    parts = []
    for column in zip(*values, strict=True):
        spread = f" ± {statistics.stdev(column):.1f}" if len(column) > 1 else ""
        parts.append(f"{statistics.fmean(column):{sign}.1f}{spread}")
    return " / ".join(parts)


def main() -> None:
    """Train missing models, print the table and write it to OUT/kept/table.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="data set and prefix of the recipes: digits, cifar10, ...")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repairs", default=",".join(REPAIRS), help="repair methods of the first training method")
    parser.add_argument("--model", default="resnet18", help="architecture of --weights")
    parser.add_argument("--weights", type=Path, help="repair this trained model instead of training")
    parser.add_argument("--eps", default="8/255", help="radius for --weights")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--floors", default="", help="also repair to these floors, e.g. 25,30")
    parser.add_argument("--attack", default="fast")
    parser.add_argument("--also", nargs="*", default=["corruptions:severity=3"], help="further attacks")
    parser.add_argument("-o", "--override", action="append", default=[], help="recipe setting as key=value")
    parser.add_argument("--minutes", type=float, help="time limit; no model starts that would exceed it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="kept", type=Path, help="only print the table of these kept files")
    given = parser.parse_args()
    if given.kept is not None:
        print(table(given.kept))
        return
    if given.data is None or given.out is None:
        parser.error("--data and --out are needed, or --from")
    given.floors = [float(part) for part in given.floors.split(",") if part]
    began, longest = time.monotonic(), 0.0
    for seed in map(int, given.seeds.split(",")):
        if given.weights is not None:
            place = given.out / given.weights.stem / f"seed-{seed}"
            model = {"model": given.model, "weights": given.weights, "eps": given.eps, "split": "train"}
            repair_each(given, place, given.repairs.split(","), seed, **model)
            continue
        for method in given.methods.split(","):
            left = float("inf") if given.minutes is None else 60 * given.minutes - (time.monotonic() - began)
            if longest > left:
                print(f"{method} seed {seed}: not started, {left:.0f} s are left and the longest took {longest:.0f} s")
                continue
            start = time.monotonic()
            make(given, method, seed, first=method == METHODS[0])
            longest = max(longest, time.monotonic() - start)
            print(f"{method} seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    text = table(given.out / "kept")
    print(text)
    (given.out / "kept" / "table.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
