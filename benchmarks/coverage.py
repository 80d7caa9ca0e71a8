"""Simulated coverage of the interval of the worst class: how often it contains the lowest true class accuracy.

    python benchmarks/coverage.py --times 2000          # half an hour on one CPU core
    python benchmarks/coverage.py --times 500 --classes 10 --per-class 1000

For each number of classes, class size and shape of the true accuracies, data sets are drawn from binomials and
``classwise.metrics`` computes its 95% intervals. Three intervals are compared: Wilson's interval of the lowest measured
class, as if it had been chosen beforehand; the earlier construction (``bootstrap_shift``); and the selection-corrected
interval of ``worst_class``, for which the columns low and high count intervals entirely above and entirely below the
true value. MCD and CV are the shares of data sets whose upper limit, which ``classwise check`` uses, is not below the
true value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import numpy as np

from classwise.metrics.intervals import gap_interval, variance_interval, wilson, worst_class

SHAPES: dict[str, Callable[[int], np.ndarray]] = {
    "all equal": lambda classes: np.full(classes, 0.5),
    "one weakest": lambda classes: np.array([0.3] + [0.6] * (classes - 1)),
    "evenly spread": lambda classes: np.linspace(0.3, 0.8, classes),
}


def bootstrap_shift(correct: np.ndarray, n: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """Return the earlier construction: Wilson's interval of the lowest class, upper limit plus a bootstrapped bias."""
    share = correct / n
    low, high = wilson(correct[share.argmin()], n[share.argmin()])
    noise, spread = float(np.mean(share * (1 - share) / n)), float(np.var(share, ddof=1))
    shrink = np.sqrt(max(0.0, 1 - noise / spread)) if spread > 0 else 0.0
    rates = share.mean() + shrink * (share - share.mean())
    redrawn = np.random.default_rng(0).binomial(n, rates, size=(draws, rates.size)) / n
    bias = float(np.mean(redrawn.min(axis=1) - redrawn[:, rates.argmin()]))
    return float(low), min(float(high) - bias, 1.0)


def simulate(accuracies: np.ndarray, per_class: int, times: int, seed: int = 1) -> dict[str, float]:
    """Return the shares of covered data sets in percent, by construction."""
    n = np.full(accuracies.size, per_class)
    lowest, gap, variance = accuracies.min(), np.ptp(accuracies), np.var(accuracies)
    seen = []
    for correct in np.random.default_rng(seed).binomial(n, accuracies, size=(times, accuracies.size)):
        found, gaps, variances = worst_class(correct, n), gap_interval(correct, n), variance_interval(correct, n)
        assert found is not None
        assert gaps is not None
        assert variances is not None
        before = bootstrap_shift(correct, n)
        seen.append(
            {
                "Wilson": found.low <= lowest <= found.high,
                "before": before[0] <= lowest <= before[1],
                "after": found.corrected_low <= lowest <= found.corrected_high,
                "low": found.corrected_low > lowest,
                "high": found.corrected_high < lowest,
                # A true value of 0 is reached only up to rounding.
                "MCD": gaps[1] >= gap - 1e-12,
                "CV": variances[1] >= variance - 1e-12,
            }
        )
    return {name: 100 * float(np.mean([one[name] for one in seen])) for name in seen[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000, help="data sets per configuration")
    parser.add_argument("--classes", type=int, nargs="*", default=[2, 10, 100])
    parser.add_argument("--per-class", type=int, nargs="*", default=[50, 100, 1000])
    given = parser.parse_args()
    columns = ["Wilson", "before", "after", "low", "high", "MCD", "CV"]
    print("| classes | n | true accuracies |", " | ".join(columns), "|")
    print("|--:|--:|:--|" + "--:|" * len(columns))
    for classes, per_class, shape in product(given.classes, given.per_class, SHAPES):
        found = simulate(SHAPES[shape](classes), per_class, given.times)
        print(
            f"| {classes} | {per_class} | {shape} |",
            " | ".join(f"{found[name]:.1f}" for name in columns),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
