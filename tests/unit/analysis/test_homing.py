"""Homing with two close and two distant classes: errors between the close ones are corrected."""

# N examples, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import classwise as cw
from classwise.analysis import homing
from classwise.analysis.homing import homing_matrix
from classwise.core.errors import InputError
from classwise.storage.verdicts import Verdicts

PLANTED = '''
import numpy as np
from torch import nn

def data(split="train"):
    """Classes 0 and 1 differ by a little in the first pixel, 2 and 3 by a lot in pixels of their own."""
    random = np.random.default_rng({"train": 0, "test": 1}[split])
    labels = np.arange(400 if split == "train" else 80) % 4
    images = np.full((len(labels), 1, 2, 2), 0.2) + random.uniform(-0.02, 0.02, (len(labels), 1, 2, 2))
    images[:, 0, 0, 0] = np.select([labels == 0, labels == 1], [0.4, 0.5], 0.45)
    images[labels == 2, 0, 1, 0] = 0.95
    images[labels == 3, 0, 1, 1] = 0.95
    return images.astype(np.float32), labels

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("homing")
    (folder / "planted.py").write_text(PLANTED)
    spec = f"{folder / 'planted.py'}:data"
    cw.train(
        "digits/standard",
        out=folder / "run",
        data=spec,
        model=f"{folder / 'planted.py'}:model",
        epochs=40,
        batch_size=32,
        validation_per_class=5,
        optimizer={"name": "adam", "lr": 0.05},
    )
    cw.evaluate(str(folder / "run"), spec, attacks=["pgd"], eps=0.1, out=folder / "run")
    return folder / "run"


def test_flipped_examples_return_without_the_confused_class(planted: Path) -> None:
    found = homing(planted)
    frame = found.frame
    assert frame["flipped"].sum() == 40
    assert frame["homing"].tolist() == frame["flipped"].tolist()
    for pairs in (frame[frame["flipped"] > 0], frame[frame["one_to_one"]]):
        assert set(zip(pairs["class"], pairs["predicted_class"], strict=True)) == {("0", "1"), ("1", "0")}
    assert frame["homing_percent"].dropna().tolist() == [100.0, 100.0]
    assert found.finding.startswith("Of 40 examples misclassified under pgd, 100.0% [")


def test_finished_trainings_are_reused(planted: Path) -> None:
    first = homing(planted)
    weights = planted / "homing" / "without-2" / "checkpoints" / "best.safetensors"
    before = weights.stat().st_mtime_ns
    assert homing(planted) == first
    assert weights.stat().st_mtime_ns == before


def test_workers_give_the_same_result(planted: Path, tmp_path: Path) -> None:
    assert homing(planted, work=tmp_path / "work", workers=2) == homing(planted)


def verdicts(labels: list[int], predicted: list[int]) -> Verdicts:
    made = Verdicts.pending(np.arange(len(labels)), np.array(labels), ["pgd"])
    made.natural, made.attacks["pgd"] = np.array(labels), np.array(predicted)
    return made


def test_matrix_by_hand() -> None:
    labels = [0, 0, 0, 1, 1, 2]
    before = verdicts(labels, [1, 1, 2, 0, 1, 0])
    without = {
        0: verdicts(labels, [1, 1, 1, 1, 2, 1]),  # example 3 is corrected; example 5 is not
        1: verdicts(labels, [0, 2, 0, 0, 0, 0]),  # example 0 is corrected; example 1 is misclassified again
        2: verdicts(labels, [1, 1, 0, 0, 0, 0]),  # example 2 is corrected
    }
    found = homing_matrix("model", "pgd", ["a", "b", "c"], before, without)
    columns = ["class", "predicted_class", "flipped", "homing", "one_to_one"]
    assert found.frame[columns].to_numpy().tolist() == [
        ["a", "b", 2, 1, True],
        ["a", "c", 1, 1, False],
        ["b", "a", 1, 1, True],
        ["c", "a", 1, 0, False],
        ["b", "c", 0, 0, False],
        ["c", "b", 0, 0, False],
    ]
    assert found.finding.startswith("Of 5 examples misclassified under pgd, 60.0% [")
    flipped, home = (figure.plot.z for figure in found.figures())
    assert flipped == [[None, 2, 1], [1, None, 0], [1, 0, None]]
    assert home == [[None, 1, 1], [1, None, 0], [0, 0, None]]


def test_nothing_flipped() -> None:
    kept = verdicts([0, 1, 2], [0, 1, 2])
    found = homing_matrix("model", "pgd", ["a", "b", "c"], kept, dict.fromkeys(range(3), kept))
    assert found.frame["flipped"].sum() == 0
    assert found.frame["homing_percent"].isna().all()
    assert found.finding == "No example is misclassified under pgd, so no error can be corrected."
    assert len(found.figures()) == 2


def test_bad_input(planted: Path, make_run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the directory of a training"):
        homing(make_run("no-training", [[1, 0, 0], [0, 1, 0], [0, 0, 1]]), attack="pgd")
    with pytest.raises(InputError, match="unknown result 'square'"):
        homing(planted, attack="square")
    with pytest.raises(InputError, match="at least 1"):
        homing(planted, work=tmp_path, workers=0)
