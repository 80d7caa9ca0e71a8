"""How often the interval of the worst class holds the lowest true class accuracy, by simulation.

    python benchmarks/coverage.py --times 2000          # half an hour on one CPU core
    python benchmarks/coverage.py --times 500 --classes 10 --per-class 1000

For each number of classes, size of a class and shape of the true accuracies, data sets are drawn from binomials and
``classwise.metrics`` makes its intervals, all at 95 %. Compared are Wilson's interval of the class measured lowest, as
if it had been named beforehand; the construction used before (``bootstrap_shift``); and the corrected interval of
``worst_class``. Of the latter it is also told how often it lies wholly above the truth (low) and wholly below (high).
For MCD and CV the share of data sets is given where the upper end, on which a gate decides, is not below the truth.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from classwise.metrics.intervals import gap_interval, variance_interval, wilson, worst_class

SHAPES = {
    "all equal": lambda classes: np.full(classes, 0.5),
    "one weakest": lambda classes: np.array([0.3] + [0.6] * (classes - 1)),
    "evenly spread": lambda classes: np.linspace(0.3, 0.8, classes),
}


def bootstrap_shift(correct: np.ndarray, n: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """The construction before: Wilson's interval of the lowest class, its upper end moved up by a bootstrapped bias."""
    share = correct / n
    low, high = wilson(correct[share.argmin()], n[share.argmin()])
    noise, spread = float(np.mean(share * (1 - share) / n)), float(np.var(share, ddof=1))
    shrink = np.sqrt(max(0.0, 1 - noise / spread)) if spread > 0 else 0.0
    rates = share.mean() + shrink * (share - share.mean())
    redrawn = np.random.default_rng(0).binomial(n, rates, size=(draws, rates.size)) / n
    bias = float(np.mean(redrawn.min(axis=1) - redrawn[:, rates.argmin()]))
    return float(low), min(float(high) - bias, 1.0)


def simulate(accuracies: np.ndarray, per_class: int, times: int, seed: int = 1) -> dict[str, float]:
    """Shares of the data sets, in percent."""
    n = np.full(accuracies.size, per_class)
    lowest, gap, variance = accuracies.min(), np.ptp(accuracies), np.var(accuracies)
    seen = []
    for correct in np.random.default_rng(seed).binomial(n, accuracies, size=(times, accuracies.size)):
        found = worst_class(correct, n)
        before, (_, most_gap), (_, most_variance) = (
            bootstrap_shift(correct, n),
            gap_interval(correct, n),
            variance_interval(correct, n),
        )
        seen.append(
            {
                "Wilson": found.low <= lowest <= found.high,
                "before": before[0] <= lowest <= before[1],
                "after": found.corrected_low <= lowest <= found.corrected_high,
                "low": found.corrected_low > lowest,
                "high": found.corrected_high < lowest,
                # True values of 0 are met only up to rounding.
                "MCD": most_gap >= gap - 1e-12,
                "CV": most_variance >= variance - 1e-12,
            }
        )
    return {name: 100 * float(np.mean([one[name] for one in seen])) for name in seen[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000, help="data sets in each configuration")
    parser.add_argument("--classes", type=int, nargs="*", default=[2, 10, 100])
    parser.add_argument("--per-class", type=int, nargs="*", default=[50, 100, 1000])
    asked = parser.parse_args()
    columns = ["Wilson", "before", "after", "low", "high", "MCD", "CV"]
    print("| classes | n | true accuracies |", " | ".join(columns), "|")
    print("|--:|--:|:--|" + "--:|" * len(columns))
    for classes, per_class, shape in product(asked.classes, asked.per_class, SHAPES):
        found = simulate(SHAPES[shape](classes), per_class, asked.times)
        print(
            f"| {classes} | {per_class} | {shape} |",
            " | ".join(f"{found[name]:.1f}" for name in columns),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
