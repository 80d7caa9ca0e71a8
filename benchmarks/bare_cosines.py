"""Hypersphere embeddings with the logits of published code: cosines without the scale used in training.

    python -m benchmarks.digits_study --out runs/study --methods madry he he-lis he-cmp
    python -m benchmarks.bare_cosines --runs runs/study

PGD on the cross-entropy of cosines is weak; Temperature-PGD multiplies them by 1/T and is strong (Tian et al. 2021,
Tables 5 and 6). The table shows means over the seeds, average / worst class, for scaled logits, which our models
return, and for cosines; the last column counts the runs whose report warns that PGD overestimates robustness.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from torch import nn

import classwise as cw
from benchmarks.result import row
from classwise.models import HypersphereHead
from classwise.models.load import load_model

TEMPERATURES = (2, 5, 10, 50, 100, 300)
WARNINGS = {"unsure", "smooth-output"}


def remove_scale(model: nn.Module) -> bool:
    """Set the scale of the cosines to one, in place; return False if the model has no hypersphere head."""
    heads = [part for part in model.modules() if isinstance(part, HypersphereHead)]
    for head in heads:
        head.scale.fill_(1.0)
    return bool(heads)


def main() -> None:
    """Attack every run twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="directory with METHOD/seed-N")
    parser.add_argument("--methods", nargs="*", default=["madry", "he", "he-lis", "he-cmp"])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--eps", default="0.2")
    given = parser.parse_args()
    grid = [f"temperature-pgd:inv_t={inverse}" for inverse in TEMPERATURES]
    print(row("", "logits", "PGD-20", *(f"1/T = {inverse}" for inverse in TEMPERATURES), "warned"))
    for method in given.methods:
        for bare in (False, True):
            reports = []
            for run in sorted((given.runs / method).glob("seed-*")):
                model = load_model(str(run)).eval()
                if not bare or remove_scale(model):
                    reports.append(cw.evaluate(model, given.data, attacks=["pgd:steps=20", *grid], eps=given.eps))
            if not reports:
                continue
            cells = []
            for attack in reports[0].attacks:
                results = [report[attack] for report in reports]
                average, worst = ([getattr(result, what).value for result in results] for what in ("overall", "worst"))
                cells.append(f"{fmean(average):.1f} / {fmean(worst):.1f}")
            warned = sum(bool(WARNINGS & {finding.code for finding in report.sanity.findings}) for report in reports)
            print(row(method, "cosines" if bare else "scaled", *cells, f"{warned} of {len(reports)}"), flush=True)


if __name__ == "__main__":
    main()
