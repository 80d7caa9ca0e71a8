"""The tables of the papers, recomputed from their own columns.

Every comparison uses exact arithmetic on the printed decimals. A printed result may differ from the recomputed one only
by half a unit of its last digit plus the effect of rounded inputs. Cells that differ by more are misprints of the
papers; they are listed below with the true value. The lists must be exact: a listed cell that is consistent fails, as
does an inconsistent cell that is not listed.
"""

from __future__ import annotations

import csv
import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest

from classwise.metrics import class_variance, max_class_difference, rho
from each import for_each

DATA = Path(__file__).parents[2] / "data"


def read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def half_unit(printed: str) -> Fraction:
    """Half a unit of the last printed digit."""
    return Fraction(1, 2 * 10 ** len(printed.partition(".")[2]))


# Tian et al. 2021, Table 1 -------------------------------------------------------------------------------------

ATTACKS = read("kdd_table1_attacks.csv")
ATTACK_IDS = [f"{row['defense']}-{row['attack']}" for row in ATTACKS]

# The test set has 1000 images a class (200 where the paper samples), so that every class accuracy is a whole
# multiple of 0.1 and its one printed decimal is all there is: the inputs carry no rounding.

CV_MISPRINTS = {
    "MART-FGSM": 206.1596,
    "HE-FGSM": 200.5516,
    "Madry-CW -Linf": 212.5596,
    "TRADES-CW -Linf": 258.5900,
    "Madry-PGD": 224.3649,
    "TRADES-PGD": 263.6901,
    "MART-PGD": 235.1656,
    "HE-PGD": 224.8941,
    "TRADES-transfer": 78.1709,
    "MART-transfer": 98.9616,
    "Madry-NAttack": 190.5981,
    "MART-NAttack": 133.6556,
    "HE-NAttack": 168.6981,
}
MCD_MISPRINTS = {"HE-FGSM": 42.4, "TRADES-PGD": 51.2, "TRADES-transfer": 24.3, "HE-NAttack": 43.6}


def class_columns(row: dict[str, str]) -> list[str]:
    return [row[f"class{label}"] for label in range(10)]


@for_each("row", ATTACKS, ids=ATTACK_IDS)
@for_each(
    ("column", "metric", "misprints"),
    [("cv", class_variance, CV_MISPRINTS), ("mcd", max_class_difference, MCD_MISPRINTS)],
    ids=["cv", "mcd"],
)
def test_spread_follows_from_the_class_columns(row, column, metric, misprints):
    accuracies = [Fraction(text) for text in class_columns(row)]
    assert all((10 * accuracy).denominator == 1 for accuracy in accuracies)
    mean = sum(accuracies) / len(accuracies)
    exact = {
        "cv": sum((accuracy - mean) ** 2 for accuracy in accuracies) / len(accuracies),
        "mcd": max(accuracies) - min(accuracies),
    }[column]

    assert metric([float(accuracy) for accuracy in accuracies]) == pytest.approx(float(exact), rel=1e-12)

    key = f"{row['defense']}-{row['attack']}"
    consistent = abs(Fraction(row[column]) - exact) <= half_unit(row[column])
    assert consistent == (key not in misprints)
    if not consistent:
        assert misprints[key] == pytest.approx(float(exact), abs=1e-9)


def test_misprinted_spreads_are_truncated_except_one():
    """Every deviating cell is its value truncated after one decimal, MCD after a binary subtraction; one class is
    misprinted.
    """
    rows = dict(zip(ATTACK_IDS, ATTACKS, strict=True))
    for key, value in CV_MISPRINTS.items():
        cut = math.floor(10 * value) / 10
        assert (float(rows[key]["cv"]) == cut) == (key != "MART-transfer")
    for key in MCD_MISPRINTS:
        accuracies = [float(text) for text in class_columns(rows[key])]
        assert float(rows[key]["mcd"]) == math.floor(10 * (max(accuracies) - min(accuracies))) / 10

    # The paper's first version prints 90.2 for the last class of the row, where this one has 90.0.
    row = rows["MART-transfer"]
    first_version = [*(float(text) for text in class_columns(row)[:9]), 90.2]
    assert row["class9"] == "90.0"
    assert math.floor(10 * class_variance(first_version)) / 10 == float(row["cv"])


# Li & Liu 2023, Tables 1, 2, 3 and 5 ---------------------------------------------------------------------------

RHO_MISPRINTS = {
    ("1", "CIFAR-100", "WAT", "nat"): -0.0106,
    ("1", "CIFAR-100", "WAT", "pgd100"): 0.6491,
    ("1", "CIFAR-100", "WAT", "cw"): 1.9755,
    ("2", "CIFAR-10", "WAT", "nat"): 0.1343,
}


def rho_cells():
    """Every printed rho, with its row and the TRADES row of the same table and data set."""
    rows = read("wat_tables1-3.csv") + [
        {"table": "5", "dataset": "CIFAR-10"} | row for row in read("wat_table5_cv.csv")
    ]
    for row in rows:
        (baseline,) = (
            other
            for other in rows
            if (other["table"], other["dataset"], other["method"]) == (row["table"], row["dataset"], "TRADES")
        )
        for attack in ("nat", "pgd100", "cw", "aa"):
            if f"{attack}_rho" in row:
                key = (row["table"], row["dataset"], row["method"], attack)
                yield pytest.param(key, row, baseline, id="-".join(key))


def rho_range(inputs: list[str]) -> tuple[Fraction, Fraction]:
    """Return the range of rho over accuracies that round to these. As rho is monotone in each input, its extremes
    are at corners.

    rho = worst / baseline_worst + average / baseline_average - 2 is monotone in each of its inputs, so that it
    takes its extremes over a box of inputs in the corners.
    """
    ends = [(Fraction(text) - half_unit(text), Fraction(text) + half_unit(text)) for text in inputs]
    values = [
        worst / baseline_worst + average / baseline_average - 2
        for average, worst, baseline_average, baseline_worst in itertools.product(*ends)
    ]
    return min(values), max(values)


@for_each(("key", "row", "baseline"), list(rho_cells()))
def test_rho_follows_from_the_accuracies(key, row, baseline):
    attack = key[-1]
    inputs = [part[f"{attack}_{column}"] for part in (row, baseline) for column in ("avg", "worst")]
    average, worst, baseline_average, baseline_worst = (float(text) for text in inputs)
    ours = rho(average=average, worst=worst, baseline_average=baseline_average, baseline_worst=baseline_worst)
    printed = row[f"{attack}_rho"]

    if row["method"] == "TRADES":
        assert (printed, ours) == ("0", 0.0)
        return
    low, high = rho_range(inputs)
    assert low < Fraction(ours) < high

    rounding = half_unit(printed)
    consistent = low - rounding <= Fraction(printed) <= high + rounding
    assert consistent == (key not in RHO_MISPRINTS)
    if not consistent:
        assert round(ours, 4) == RHO_MISPRINTS[key]


def test_every_listed_misprint_is_in_the_tables():
    assert set(CV_MISPRINTS) | set(MCD_MISPRINTS) <= set(ATTACK_IDS)
    assert set(RHO_MISPRINTS) <= {cell.values[0] for cell in rho_cells()}


# Tian et al. 2021, Table 5 -------------------------------------------------------------------------------------


@for_each("training", ["standard", "adversarial"])
@for_each("row", read("kdd_table5_standard_vs_adversarial.csv"), ids=lambda row: row["dataset"])
def test_printed_spreads_are_possible_under_our_definitions(row, training):
    """No class columns are printed here, but the range of the classes bounds the variance from both sides."""
    cv, mcd = row[f"{training}_cv"], row[f"{training}_mcd"]
    low, high = float(Fraction(mcd) - half_unit(mcd)), float(Fraction(mcd) + half_unit(mcd))
    halves = [0.0] * 5 + [high] * 5  # Popoviciu: no classes with this MCD vary more
    assert max_class_difference(halves) == high
    assert float(Fraction(cv) - half_unit(cv)) <= class_variance(halves)
    if row["dataset"] not in ("CIFAR-100", "ImageNet"):  # ten classes: with this MCD, none vary less than these
        outliers = [0.0] + [low / 2] * 8 + [low]
        assert class_variance(outliers) <= float(Fraction(cv) + half_unit(cv))
