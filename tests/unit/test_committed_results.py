"""The committed results agree with the numbers in the documentation."""

# K classes

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import repair_methods, repair_study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "cifar10-resnet18"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
METHODS = ["TRADES", "WAT", "CSL", "DAFA", "CFA", "FRL-RWRM"]
MEASURED_LAST = ["TRADES", "WAT", "CSL", "DAFA", "FRL-RWRM"]


def by_class(run: Path, attack: str | None = None) -> np.ndarray:
    """(K,) accuracy in percent, from the predictions alone."""
    table = pq.read_table(run / "verdicts.parquet")
    label, natural, attacked = (
        table[column].to_numpy() for column in ("label", "natural", f"pred:{attack}" if attack else "natural")
    )
    correct = (natural == label) & (attacked == label)
    return np.array([100 * correct[label == c].mean() for c in range(len(NAMES))])


def written(accuracy: np.ndarray, *, named: bool = False) -> str:
    name = f" ({NAMES[accuracy.argmin()]})" if named else ""
    average = round(accuracy.mean(), 4)  # as in reports; a mean of ten quotients has rounding errors
    return f"{average:.1f} / {accuracy.min():.1f}{name}"


def rows(file: str, heading: str, method: str) -> list[list[str]]:
    """The cells after the method's name, of every table from a heading on."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text[text.index(heading) :].splitlines()
    return [
        [cell.strip(" *") for cell in line.replace("**", "").strip("|").split("|")][1:]
        for line in lines
        if line.startswith(f"| {method} |")
    ]


@pytest.mark.parametrize("method", METHODS)
def test_documented_figures_match_the_verdicts(method: str) -> None:
    run, trades = RESULTS / method.lower(), by_class(RESULTS / "trades", "pgd")
    natural, pgd = by_class(run), by_class(run, "pgd")
    gain, loss = pgd.min() / trades.min() - 1, 1 - pgd.mean() / trades.mean()
    best = json.loads((run / "run.json").read_text())["training"]["best_epoch"]
    epoch, *figures = rows("docs/measured.md", "## Training on CIFAR-10: six methods", method)[0]
    assert epoch.split()[0] == str(best)
    assert figures == [
        written(natural, named=True),
        written(pgd, named=True),
        f"{pgd.var():.1f}",
        f"{np.ptp(pgd):.1f}",
        "" if method == "TRADES" else f"{gain - loss:+.3f}",
    ]


@pytest.mark.parametrize("method", METHODS)
def test_readme_figures_match_the_verdicts(method: str) -> None:
    run, trades = RESULTS / method.lower(), by_class(RESULTS / "trades", "pgd")
    natural, pgd = by_class(run), by_class(run, "pgd")
    change = f"{pgd.mean() - trades.mean():+.1f} / {pgd.min() - trades.min():+.1f}".replace("-", "−")
    assert rows("README.md", "## Training methods", method) == [
        [written(natural), written(pgd), "" if method == "TRADES" else change]
    ]


@pytest.mark.parametrize("method", MEASURED_LAST)
def test_figures_of_the_last_epoch_match_the_verdicts(method: str) -> None:
    run = RESULTS / method.lower() / "last"
    figures = rows("docs/measured.md", "## Training on CIFAR-10: six methods", method)[1]
    assert figures[:3] == [written(by_class(run)), written(by_class(run, "pgd")), written(by_class(run, "fast"))]


@pytest.mark.parametrize("method", METHODS)
def test_the_reports_agree_with_the_verdicts(method: str) -> None:
    run = RESULTS / method.lower()
    stated, accuracy = json.loads((run / "report.json").read_text())["results"]["pgd"], by_class(run, "pgd")
    assert stated["overall"]["value"] == pytest.approx(accuracy.mean())
    assert stated["worst"]["value"] == pytest.approx(accuracy.min())


def test_wat_reproduces_the_direction_and_the_size_of_the_paper() -> None:
    trades, wat = (by_class(RESULTS / name, "pgd") for name in ("trades", "wat"))
    assert wat.min() - trades.min() >= 7
    assert trades.mean() - wat.mean() <= 3.5


def test_documented_repairs_match_the_kept_files() -> None:
    """Every row of the table in docs/measured.md, from ``repair.json`` files alone."""
    printed = [
        line
        for kept in ("repair-digits", "repair-datasets/mnist", "repair-datasets/svhn")
        for line in repair_methods.table(ROOT / "results" / kept).splitlines()
    ]
    documented = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8").splitlines()
    assert len(printed) > 10
    assert set(printed) <= set(documented)


def test_documented_repairs_of_cifar10_models_match_the_kept_files() -> None:
    printed = repair_study.tables(ROOT / "results" / "repair-checkpoints").splitlines()
    documented = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8").splitlines()
    assert len(printed) > 20
    assert {line for line in printed if line} <= set(documented)
    summary = " ".join((ROOT / "docs" / "repair.md").read_text(encoding="utf-8").split())
    for model in ("trades", "wat"):
        before, after = rows("docs/measured.md", "## Repair", model)[0][1:3]
        assert f"{model.upper()} from {before} to {after}" in summary


@pytest.mark.parametrize("method", ["norms", "head-sam", "retrain", "finetune:how=spectral", "finetune:how=faal"])
def test_documented_baselines_of_repair_match_the_verdicts(method: str) -> None:
    run = ROOT / "results" / "repair-checkpoints" / "trades" / "methods" / method.replace(":", "-").replace("=", "-")
    cells = rows("docs/measured.md", "## Repair", f"`{method}`")[0]
    test = json.loads((run / "repair.json").read_text())["test"]
    assert cells[0] == written(by_class(run, "fast"))
    assert cells[1] == f"{by_class(run).mean():.1f}"
    assert cells[2:4] == [f"{test['ece_after']:.1f}", f"{test['corrupted_after']:.1f}"]
    assert cells[4].startswith(f"{test['average_change']:+.1f}".replace("-", "−"))


def test_the_matrix_predicts_every_class_under_a_fresh_attack() -> None:
    """On the repaired CIFAR-10 models, within half a point."""
    for model in ("trades", "wat"):
        study = json.loads((ROOT / "results" / "repair-checkpoints" / model / "repair-study.json").read_text())
        for per_class in ("300", "100"):
            for split in study["attack"][per_class]:
                assert np.abs(split["matrix_minus_measured"]).max() <= 0.5
