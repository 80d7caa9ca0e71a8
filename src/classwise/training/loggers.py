"""Loggers of training metrics, besides ``metrics.jsonl``: TensorBoard, MLflow, or user objects.

Loggers cannot change results. A logger that raises is removed with one warning. After ``--resume`` a logger gets all
epochs after the last one it has.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from classwise.core.errors import InputError, one_line, unknown
from classwise.core.progress import Epoch
from classwise.storage.files import read_json, write_json


class Logger(Protocol):
    """Receives the epochs of one or several trainings; ``epoch.run`` identifies the training."""

    def epoch(self, epoch: Epoch) -> None:
        """Log a finished epoch."""

    def close(self) -> None:
        """Finish logging; called also after errors."""


class Loggers(AbstractContextManager["Loggers"]):
    """Several loggers, whose exceptions become warnings."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = list(loggers)

    def epoch(self, epoch: Epoch) -> None:
        """Log an epoch with every logger."""
        self._each(lambda logger: logger.epoch(epoch))

    def __exit__(self, *error: object) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:
                self.loggers.remove(logger)
                warnings.warn(f"logger {type(logger).__name__} failed and was removed: {one_line(error)}", stacklevel=4)


def scalars(record: Mapping[str, Any], classes: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an epoch by name, without those that were not measured. Accuracies are on validation.

    >>> robust = {"overall": 40.0, "worst": {"label": 1, "value": 20.0}, "by_class": [60.0, 20.0]}
    >>> record = {"loss": 0.5, "lr": 0.1, "validation": {"natural": None, "robust": robust}}
    >>> for name, value in scalars(record, ["ant", "a/b?"]):
    ...     print(name, value)
    loss 0.5
    lr 0.1
    robust 40.0
    worst 20.0
    robust by class/0 ant 60.0
    robust by class/1 a_b_ 20.0
    """
    found: dict[str, float | None] = {"loss": record["loss"], "lr": record["lr"]}
    natural, robust = record["validation"]["natural"], record["validation"]["robust"]
    if natural is not None:
        found["natural"] = natural["overall"]
    if robust is not None:
        found |= {"robust": robust["overall"], "worst": robust["worst"]["value"]}
        found |= {f"robust by class/{label} {_tag(classes[label])}": v for label, v in enumerate(robust["by_class"])}
    for name, value in found.items():
        if value is not None and math.isfinite(value):
            yield name, value


def _tag(name: str) -> str:
    """Convert a class name to characters that MLflow accepts; the label in front keeps names unique."""
    return re.sub(r"[^A-Za-z0-9 _.-]", "_", name)[:80]


class _Series:
    """The last logged epoch of every run directory."""

    def __init__(self) -> None:
        self.last: dict[Path, int] = {}

    def missing(self, epoch: Epoch) -> Iterator[Mapping[str, Any]]:
        """Yield the records after the last logged one, and mark them as logged."""
        for record in epoch.history:
            if record["epoch"] > self.last[epoch.run]:
                yield record
                self.last[epoch.run] = record["epoch"]


class TensorBoard:
    """Writes event files to ``tensorboard/`` in the run directory."""

    def __init__(self) -> None:
        self.make_writer = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self.read = _package("tensorboard", "tensorboard.backend.event_processing.event_accumulator").EventAccumulator
        self.writers: dict[Path, Any] = {}
        self.series = _Series()

    def epoch(self, epoch: Epoch) -> None:
        """Write the epochs that are not in the event files yet."""
        if epoch.run not in self.writers:
            place = epoch.run / "tensorboard"
            self.series.last[epoch.run] = self._last(place) if place.is_dir() else 0
            self.writers[epoch.run] = self.make_writer(str(place))
        writer = self.writers[epoch.run]
        for record in self.series.missing(epoch):
            for name, value in scalars(record, epoch.classes):
                writer.add_scalar(name, value, record["epoch"])
        writer.flush()

    def _last(self, place: Path) -> int:
        events = self.read(str(place)).Reload()
        return events.Scalars("loss")[-1].step if "loss" in events.Tags()["scalars"] else 0

    def close(self) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()


class MLflow:
    """Writes one MLflow run per run directory, whose id is kept in ``mlflow.json``.

    The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME select the store and the experiment.
    """

    BATCH = 1000
    """Maximum number of metrics per MLflow request."""

    def __init__(self) -> None:
        self.mlflow = _package("mlflow", "mlflow")
        self.client: Any = None
        self.ids: dict[Path, str] = {}
        self.series = _Series()

    def epoch(self, epoch: Epoch) -> None:
        """Send the epochs that are not in the MLflow run yet."""
        self.client = self.client or self.mlflow.MlflowClient()
        if epoch.run not in self.ids:
            known = self._open(epoch.run)
            steps = [metric.step for metric in self.client.get_metric_history(known, "loss")]
            self.ids[epoch.run], self.series.last[epoch.run] = known, max(steps, default=0)
        for record in self.series.missing(epoch):
            now = int(1000 * time.time())
            found = [
                self.mlflow.entities.Metric(name, value, now, record["epoch"])
                for name, value in scalars(record, epoch.classes)
            ]
            for start in range(0, len(found), self.BATCH):
                self.client.log_batch(self.ids[epoch.run], metrics=found[start : start + self.BATCH])

    def _open(self, run: Path) -> str:
        """Return the id of the previous MLflow run if this store has it, else of a new one."""
        note = run / "mlflow.json"
        if note.exists():
            known = str(read_json(note)["run_id"])
            try:
                self.client.update_run(known, status="RUNNING")
            except self.mlflow.MlflowException:
                pass  # the id is from another store
            else:
                return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "classwise")
        experiment = self.client.get_experiment_by_name(name)
        place = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        made = str(self.client.create_run(place, run_name=run.resolve().name).info.run_id)
        write_json(note, {"run_id": made})
        return made

    def close(self) -> None:
        """Mark the MLflow runs as finished."""
        for known in self.ids.values():
            self.client.set_terminated(known)


LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def make_loggers(given: Iterable[str | Logger]) -> list[Logger]:
    """Return loggers, made from names where names are given."""
    found: list[Logger] = []
    for one in given:
        if isinstance(one, str) and one not in LOGGERS:
            raise unknown("logger", one, LOGGERS)
        found.append(LOGGERS[one]() if isinstance(one, str) else one)
    return found


def _package(extra: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        hint = f"pip install 'classwise[{extra}]'"
        raise InputError(f"logging to {extra} needs a missing package: {hint} ({one_line(error, 120)})") from None
