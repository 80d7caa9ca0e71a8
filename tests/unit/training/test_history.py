from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from classwise.core.types import ClassControls, ClassStats
from classwise.training.history import controls_record, stats_record, write_history


def test_history_has_one_line_per_epoch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_history(path, [{"epoch": 1}, {"epoch": 2}])
    write_history(path, [{"epoch": 1}, {"epoch": 2}, {"epoch": 3, "lr": 0.5}])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3, "lr": 0.5}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_history(path, [{"lr": float("nan")}])
    assert path.read_text(encoding="utf-8").splitlines() == lines


def test_stats_record_by_hand():
    stats = ClassStats.zeros(3)
    stats.n = torch.tensor([4, 0, 8])
    stats.n_nat, stats.correct_nat = torch.tensor([4, 0, 8]), torch.tensor([3, 0, 8])
    stats.n_adv, stats.correct_adv = torch.tensor([4, 0, 8]), torch.tensor([2, 0, 1])
    stats.loss_nat = torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64)
    stats.loss_adv = torch.tensor([6.0, 0.0, 4.0], dtype=torch.float64)
    assert stats_record(stats) == {
        "n": [4, 0, 8],
        "natural": {"overall": 91.6667, "by_class": [75, None, 100], "worst": {"label": 0, "value": 75}},
        "robust": {"overall": 25, "by_class": [50, None, 12.5], "worst": {"label": 2, "value": 12.5}},
        "loss_nat": [0.5, None, 0.25],
        "loss_adv": [1.5, None, 0.5],
    }


def test_stats_record_without_logits():
    record = stats_record(ClassStats.zeros(2))
    assert (record["natural"], record["robust"]) == (None, None)
    assert record["loss_nat"] == [None, None]
    json.dumps(record, allow_nan=False)


def test_controls_left_at_one_are_omitted():
    controls = ClassControls.uniform(2)
    assert controls_record(controls) == {}
    turned = replace(controls, weight_adv=torch.tensor([1.0, 2.0]), sampling=torch.tensor([0.25, 0.75]))
    assert controls_record(turned) == {"weight_adv": [1, 2], "sampling": [0.25, 0.75]}
