"""The training history in ``metrics.jsonl``: one line per epoch. Accuracies are in percent; missing ones are null."""

# K classes

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from classwise.core.types import ClassControls, ClassStats
from classwise.storage.files import write_text

Record = dict[str, Any]


def write_history(path: Path, records: Sequence[Record]) -> None:
    """Write all lines atomically, so that the file is always complete and never ahead of the checkpoint."""
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def read_history(path: Path) -> list[Record]:
    """Read the records of all epochs."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stats_record(stats: ClassStats) -> Record:
    """Convert class statistics to a record."""
    return {
        "n": stats.n.tolist(),
        "natural": _accuracy(stats.correct_nat, stats.n_nat),
        "robust": _accuracy(stats.correct_adv, stats.n_adv),
        "loss_nat": _numbers(stats.loss_nat / stats.n),
        "loss_adv": _numbers(stats.loss_adv / stats.n),
    }


def controls_record(controls: ClassControls) -> Record:
    """Convert the controls of an epoch to a record, without those that are 1 for every class."""
    present = {f.name: value for f in fields(controls) if (value := getattr(controls, f.name)) is not None}
    return {name: value.tolist() for name, value in present.items() if not bool((value == 1).all())}


def _accuracy(correct: Tensor, n: Tensor) -> Record | None:
    if not int(n.sum()):
        return None
    by_class = 100 * correct / n
    worst = int(by_class.nan_to_num(nan=math.inf).argmin())
    return {
        "overall": round(100 * float(correct.sum() / n.sum()), 4),
        "by_class": _numbers(by_class),
        "worst": {"label": worst, "value": round(float(by_class[worst]), 4)},
    }


def _numbers(values: Tensor) -> list[float | None]:
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]
