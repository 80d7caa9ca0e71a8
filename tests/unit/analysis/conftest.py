"""Fixtures: runs with given confusion matrices, and a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import classwise as cw
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(name, counts, natural=None, classes=None)``: a run with these confusion matrices."""

    def make(
        name: str,
        counts: Sequence[Sequence[int]],
        natural: Sequence[Sequence[int]] | None = None,
        classes: Sequence[str] | None = None,
    ) -> Path:
        adversarial = np.array(counts)
        natural_counts = np.diag(adversarial.sum(1)) if natural is None else np.array(natural)
        labels = np.repeat(np.arange(len(adversarial)), adversarial.sum(1))

        def predictions(matrix: np.ndarray) -> np.ndarray:
            return np.concatenate([np.repeat(np.arange(len(matrix)), row) for row in matrix])

        verdicts = Verdicts.pending(np.arange(len(labels)), labels, ["pgd"])
        verdicts.natural = predictions(natural_counts)
        verdicts.attacks["pgd"] = predictions(adversarial)
        report = cw.ClassReport.from_verdicts(
            verdicts,
            dataset=DatasetInfo(
                name="planted", split="test", n=len(labels), classes=list(classes or map(str, range(len(adversarial))))
            ),
            model={"name": name},
            threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
            attacks={},
        )
        (tmp_path / name).mkdir()
        verdicts.save(tmp_path / name / "verdicts.parquet", "planted")
        report.to_json(tmp_path / name / "report.json")
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small robust model of digits, trained for two epochs and attacked on ten images a class."""
    out = tmp_path_factory.mktemp("analysis") / "trained"
    cw.train("digits/madry", out=out, epochs=2, attack={"steps": 2})
    cw.evaluate(str(out), "digits", attacks=["pgd:steps=3"], eps=0.1, per_class=10, out=out)
    return out
