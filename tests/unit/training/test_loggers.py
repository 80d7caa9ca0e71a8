"""Loggers receive every epoch once, also after interruptions, and do not change results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import classwise as cw
from classwise.config.recipes import load_recipe
from classwise.core.errors import Diverged, InputError
from classwise.core.progress import Epoch, Progress
from classwise.training.loggers import LOGGERS, Loggers, make_loggers, scalars

QUICK: dict[str, Any] = {"epochs": 3, "attack": {"steps": 1}, "validation_per_class": 5, "batch_size": 400}
STEPS = 3
"""Steps per epoch."""


class Noting:
    """Records epochs and draws from the global random generator."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.closed = 0

    def epoch(self, epoch: Epoch) -> None:
        torch.rand(100)
        self.epochs.append(epoch)

    def close(self) -> None:
        self.closed += 1


class Failing(Noting):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def epoch(self, epoch: Epoch) -> None:
        super().epoch(epoch)
        if self.where == "epoch":
            raise OSError("the disk\nis full")

    def close(self) -> None:
        super().close()
        if self.where == "close":
            raise RuntimeError("no such server")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last(run: Path) -> bytes:
    return (run / "checkpoints" / "last.safetensors").read_bytes()


def test_loggers_get_epochs_as_on_disk(tmp_path: Path) -> None:
    noting = Noting()
    run = cw.train("digits/trades", out=tmp_path / "told", loggers=[noting], **QUICK)
    records = metrics(run.directory)
    assert [json.loads(json.dumps(epoch.record)) for epoch in noting.epochs] == records
    assert [len(epoch.history) for epoch in noting.epochs] == [1, 2, 3]
    assert {epoch.run for epoch in noting.epochs} == {tmp_path / "told"}
    assert {tuple(epoch.classes) for epoch in noting.epochs} == {run.classes}
    assert noting.closed == 1
    cw.train("digits/trades", out=tmp_path / "untold", **QUICK)
    assert last(tmp_path / "told") == last(tmp_path / "untold")


def test_resumed_logs_have_no_duplicates(tmp_path: Path, stop_after: Callable[[int], Progress]) -> None:
    first, second = Noting(), Noting()
    with pytest.raises(KeyboardInterrupt):
        cw.train("digits/trades", out=tmp_path, loggers=[first], progress=stop_after(STEPS + 1), **QUICK)
    assert first.closed == 1
    cw.train("digits/trades", out=tmp_path, loggers=[second], resume=True, **QUICK)
    assert [epoch.record["epoch"] for epoch in first.epochs + second.epochs] == [1, 2, 3]
    assert [record["epoch"] for record in second.epochs[0].history] == [1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_runs_have_separate_logs(tmp_path: Path, workers: int) -> None:
    noting = Noting()
    recipes = {tmp_path / str(seed): load_recipe("digits/trades", {**QUICK, "seed": seed}) for seed in (0, 1)}
    cw.train_together(recipes, workers=workers, loggers=[noting])
    for place in recipes:
        told = [json.loads(json.dumps(epoch.record)) for epoch in noting.epochs if epoch.run == place]
        assert told == metrics(place)
    assert noting.closed == 1


@pytest.mark.parametrize(("where", "count"), [("epoch", 1), ("close", 3)])
def test_failing_logger_is_removed_with_one_warning(tmp_path: Path, where: str, count: int) -> None:
    failing, noting = Failing(where), Noting()
    with pytest.warns(UserWarning, match="logger Failing failed and was removed: .*(disk is full|such server)") as told:
        run = cw.train("digits/trades", out=tmp_path, loggers=[failing, noting], **QUICK)
    assert len(told) == 1
    assert (len(failing.epochs), len(noting.epochs), noting.closed) == (count, 3, 1)
    assert run.outcome.epochs == 3


def test_loggers_are_closed_when_training_diverges(tmp_path: Path) -> None:
    noting = Noting()
    with pytest.raises(Diverged):
        cw.train("digits/standard", out=tmp_path, loggers=[noting], optimizer={"name": "sgd", "lr": 1e9}, **QUICK)
    assert noting.closed == 1


def test_unknown_logger_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown logger 'tensorbord': did you mean 'tensorboard'"):
        cw.train("digits/standard", out=tmp_path / "run", loggers=["tensorbord"])
    assert not (tmp_path / "run").exists()


MISSING = """
import sys
from classwise.cli import main
out, *names = sys.argv[1:]
for name in names:
    sys.modules[name] = None
    sys.argv[1:] = ["train", "digits/standard", "--log", name, "--out", out]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def test_missing_package_is_one_line_error(tmp_path: Path) -> None:
    """Training does not start if the packages cannot be imported."""
    command = [sys.executable, "-c", MISSING, str(tmp_path / "run"), *LOGGERS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * len(LOGGERS)
    for name, line in zip(LOGGERS, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"error: logging to {name} needs a missing package: pip install 'classwise[{name}]'")
    assert not (tmp_path / "run").exists()


def test_scalars_of_a_run_without_validation_and_of_empty_classes() -> None:
    nothing = {"natural": None, "robust": None}
    assert dict(scalars({"loss": 1.5, "lr": 0.1, "validation": nothing}, ["a"])) == {"loss": 1.5, "lr": 0.1}
    robust = {"overall": 10.0, "worst": {"label": 2, "value": 5.0}, "by_class": [None, 15.0, 5.0]}
    found = dict(scalars({"loss": 1.5, "lr": 0.1, "validation": {"natural": None, "robust": robust}}, ["a", "\n", "é"]))
    assert found == {
        "loss": 1.5,
        "lr": 0.1,
        "robust": 10.0,
        "worst": 5.0,
        "robust by class/1 _": 15.0,
        "robust by class/2 _": 5.0,
    }


@pytest.fixture
def hostile_data(tmp_path: Path) -> str:
    """Small images in folders with special characters in their names."""
    random = np.random.default_rng(0)
    for name in ("=1+1", "<b> & \n é", "c" * 200):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        for number in range(12):
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
    return f"folder:{tmp_path / 'data'}"


def series(records: list[dict[str, Any]], classes: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """Epochs and values of the records by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in scalars(record, classes):
            found.setdefault(name, []).append((record["epoch"], value))
    return found


def interrupted_and_resumed(
    data: str, out: Path, stop_after: Callable[[int], Progress], *names: str
) -> dict[str, list[tuple[int, float]]]:
    """Train one epoch without loggers, one with them, then the rest; return the expected log."""
    settings = {**QUICK, "epochs": 4, "data": {"name": data}, "batch_size": 10, "model": "digits-cnn"}
    for steps, given in ((3, ()), (3, names)):
        with pytest.raises(KeyboardInterrupt):
            cw.train("digits/trades", out=out, loggers=given, resume=True, progress=stop_after(steps), **settings)
    run = cw.train("digits/trades", out=out, loggers=names, resume=True, **settings)
    assert [record["epoch"] for record in metrics(out)] == [1, 2, 3, 4]
    return series(metrics(out), run.classes)


def test_tensorboard_reads_back_what_was_measured(
    tmp_path: Path, stop_after: Callable[[int], Progress], hostile_data: str
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = interrupted_and_resumed(hostile_data, tmp_path / "run", stop_after, "tensorboard")
    assert {"loss", "lr", "natural", "robust", "worst"} < set(expected)
    assert len(expected) == 5 + 3
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, values in expected.items():
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([v for _, v in values], rel=1e-6)


@pytest.fixture
def mlflow_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty local database."""
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/store.db")
    return mlflow.MlflowClient()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_mlflow_reads_back_what_was_measured(
    tmp_path: Path, stop_after: Callable[[int], Progress], hostile_data: str, mlflow_store: Any
) -> None:
    expected = interrupted_and_resumed(hostile_data, tmp_path / "run", stop_after, "mlflow")
    experiment = mlflow_store.get_experiment_by_name("classwise")
    (run,) = mlflow_store.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert json.loads((tmp_path / "run" / "mlflow.json").read_text()) == {"run_id": run.info.run_id}
    assert set(run.data.metrics) == set(expected)
    for name, values in expected.items():
        history = mlflow_store.get_metric_history(run.info.run_id, name)
        assert sorted((metric.step, metric.value) for metric in history) == values

    # A run id of another store is ignored, and a thousand classes are sent in two batches.
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "mlflow.json").write_text('{"run_id": "0123456789abcdef0123456789abcdef"}')
    robust = {"overall": 1.0, "worst": {"label": 0, "value": 0.0}, "by_class": [k / 10 for k in range(1000)]}
    record = {"epoch": 1, "loss": 1.0, "lr": 0.1, "validation": {"natural": None, "robust": robust}}
    classes = [f"class {label}" for label in range(1000)]
    with Loggers(make_loggers(["mlflow"])) as log:
        log.epoch(Epoch(run=tmp_path / "many", epochs=1, classes=classes, history=[record]))
    made = json.loads((tmp_path / "many" / "mlflow.json").read_text())["run_id"]
    assert len(mlflow_store.get_run(made).data.metrics) == 1004
