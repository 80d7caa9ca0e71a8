"""Hypersphere embeddings as published code hands them out: their logits are cosines, without the scale of training.

    python benchmarks/digits_study.py --out runs/study --methods madry he he-lis he-cmp
    python benchmarks/bare_cosines.py --runs runs/study

PGD on the cross-entropy of such logits is weak; Temperature-PGD multiplies them in the attack by 1/T and is not (Tian
et al. 2021, Tables 5 and 6). Means over the seeds, average / worst class, of the scaled logits, which is what our
models return, and of the bare ones; last, of how many runs the report says unasked that PGD overrates the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from torch import nn

import classwise as cw
from classwise.models import HypersphereHead
from classwise.models.load import load_model

TEMPERATURES = (2, 5, 10, 50, 100, 300)
TOLD = {"unsure", "smooth-output"}


def stripped(model: nn.Module) -> bool:
    """Set the scale of a model's cosines to one, in place; False where it has none."""
    heads = [part for part in model.modules() if isinstance(part, HypersphereHead)]
    for head in heads:
        head.scale.fill_(1.0)
    return bool(heads)


def main() -> None:
    """Attack every run twice, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="with METHOD/seed-N")
    parser.add_argument("--methods", nargs="*", default=["madry", "he", "he-lis", "he-cmp"])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--eps", default="0.2")
    asked = parser.parse_args()
    grid = [f"temperature-pgd:inv_t={inverse}" for inverse in TEMPERATURES]
    row("", "logits", "PGD-20", *(f"1/T = {inverse}" for inverse in TEMPERATURES), "told")
    for method in asked.methods:
        for bare in (False, True):
            reports = []
            for run in sorted((asked.runs / method).glob("seed-*")):
                model = load_model(str(run)).eval()
                if not bare or stripped(model):
                    reports.append(cw.evaluate(model, asked.data, attacks=["pgd:steps=20", *grid], eps=asked.eps))
            if not reports:
                continue
            cells = []
            for attack in reports[0].attacks:
                results = [report[attack] for report in reports]
                average, worst = ([getattr(result, what).value for result in results] for what in ("overall", "worst"))
                cells.append(f"{fmean(average):.1f} / {fmean(worst):.1f}")
            told = sum(bool(TOLD & {finding.code for finding in report.sanity.findings}) for report in reports)
            row(method, "cosines" if bare else "as they are", *cells, f"{told} of {len(reports)}")


def row(*cells: str) -> None:
    """One line of a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
