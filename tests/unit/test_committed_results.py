"""The measured results that the repository carries: their verdicts say what the documentation prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "cifar10-resnet18"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
METHODS = ["TRADES", "WAT", "CSL", "DAFA", "CFA", "FRL-RWRM"]


def by_class(run: Path, column: str) -> np.ndarray:
    """Accuracy in percent, from the predictions alone."""
    table = pq.read_table(run / "verdicts.parquet")
    label, natural, attacked = (table[c].to_numpy() for c in ("label", "natural", "pred:" + column))
    correct = (natural == label) & (attacked == label)
    return np.array([100 * correct[label == c].mean() for c in range(len(NAMES))])


def documented(line: str) -> list[str]:
    text = (ROOT / "docs" / "measured.md").read_text()
    section = text[text.index("## Training on CIFAR-10: six methods") :]
    rows = [row for row in section.splitlines() if row.startswith(f"| {line} |")]
    return [cell.strip().replace("*", "") for cell in rows[0].strip("|").split("|")]


@pytest.mark.parametrize("method", METHODS)
def test_the_documented_figures_are_those_of_the_verdicts(method: str) -> None:
    run = RESULTS / method.lower()
    accuracy = by_class(run, "pgd")
    _, epoch, _, pgd, cv, mcd, _ = documented(method)
    worst = int(accuracy.argmin())
    assert pgd == f"{accuracy.mean():.1f} / {accuracy[worst]:.1f} ({NAMES[worst]})"
    assert float(cv) == pytest.approx(accuracy.var(), abs=0.051)
    assert float(mcd) == pytest.approx(np.ptp(accuracy), abs=0.051)
    assert re.match(r"\d+", epoch)[0] == str(json.loads((run / "run.json").read_text())["training"]["best_epoch"])  # type: ignore[index]


@pytest.mark.parametrize("method", METHODS)
def test_the_reports_agree_with_the_verdicts(method: str) -> None:
    run = RESULTS / method.lower()
    stated = json.loads((run / "report.json").read_text())["results"]["pgd"]
    accuracy = by_class(run, "pgd")
    assert stated["overall"]["value"] == pytest.approx(accuracy.mean())
    assert stated["worst"]["value"] == pytest.approx(accuracy.min())


def test_wat_reproduces_the_direction_and_the_size_of_the_paper() -> None:
    trades, wat = (by_class(RESULTS / name, "pgd") for name in ("trades", "wat"))
    assert wat.min() - trades.min() >= 7
    assert trades.mean() - wat.mean() <= 3.5
