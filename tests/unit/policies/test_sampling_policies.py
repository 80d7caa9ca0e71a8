"""Policies that sample classes: hand-computed sequences, absent classes, and the classes drawn in training."""

# K classes

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import classwise as cw
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.types import ClassStats, Task
from classwise.policies.cfol import CFOL


def errors(wrong: list[int], n: list[int]) -> ClassStats:
    """Training statistics with so many errors under attack among so many examples."""
    made = ClassStats.zeros(len(n))
    made.n += torch.tensor(n)
    made.n_adv += made.n
    made.correct_adv += made.n - torch.tensor(wrong)
    return made


def started(num_classes: int = 2, **settings: Any) -> CFOL:
    policy = CFOL(**settings)
    first = policy.start(Task(classes=tuple(map(str, range(num_classes)))))
    assert first.sampling is None
    assert torch.equal(first.weight_adv, torch.ones(num_classes))
    return policy


def test_cfol_sampling_by_hand() -> None:
    """K = 2, gamma = 1/2, eta = ln 2 / 4.

    Epoch 1, every example once: errors (1, 3) at p = (1/2, 1/2) add ln 2 / 4 · (2, 6); the scores differ by ln 2, so
    q = (1/3, 2/3) and p = 1/4 + q/2 = (5/12, 7/12). Epoch 2: errors (5, 7) in proportion to p, so both classes err
    alike and both gain 12 · ln 2 / 4: p stays. Epoch 3: errors (5, 0) add (3 ln 2, 0): the scores differ by -2 ln 2, q
    is (4/5, 1/5) and p = (13/20, 7/20).
    """
    policy = started(eta=math.log(2) / 4, gamma=0.5)
    course = [
        (errors([1, 3], [10, 10]), (5 / 12, 7 / 12)),
        (errors([5, 7], [8, 12]), (5 / 12, 7 / 12)),
        (errors([5, 0], [9, 11]), (13 / 20, 7 / 20)),
    ]
    for epoch, (train, expected) in enumerate(course, 1):
        controls = policy.on_epoch_end(train, ClassStats.zeros(2), epoch)
        assert controls.sampling is not None
        assert controls.sampling.tolist() == pytest.approx(expected)
        assert torch.equal(controls.weight_nat, torch.ones(2))
        assert torch.equal(controls.weight_adv, torch.ones(2))


def test_cfol_weights_by_hand() -> None:
    """The same start, but every example once in all epochs, so errors are always divided by 1/2.

    Epoch 1: p = (5/12, 7/12), weights 2p. Epoch 2: errors (5, 7) add ln 2 / 4 · (10, 14): the scores differ by 2 ln 2,
    q is (1/5, 4/5), p is (7/20, 13/20). Epoch 3: errors (8, 4) add ln 2 / 4 · (16, 8), and the scores are equal again.
    """
    policy = started(eta=math.log(2) / 4, gamma=0.5, mode="reweighting")
    course = [([1, 3], (5 / 6, 7 / 6)), ([5, 7], (0.7, 1.3)), ([8, 4], (1.0, 1.0))]
    for epoch, (wrong, expected) in enumerate(course, 1):
        controls = policy.on_epoch_end(errors(wrong, [10, 10]), ClassStats.zeros(2), epoch)
        assert controls.sampling is None
        assert controls.weight_adv.tolist() == pytest.approx(expected)
        assert torch.equal(controls.weight_nat, controls.weight_adv)


def test_cfol_weights_keep_the_scale_of_the_loss_where_classes_differ_in_size() -> None:
    """Equal error rates, 2 of 20 and 1 of 10: both scores gain 30/10, p stays uniform, classes weigh 1/2 in sum."""
    policy = started(eta=0.1, mode="reweighting")
    controls = policy.on_epoch_end(errors([2, 1], [20, 10]), ClassStats.zeros(2), 1)
    assert controls.weight_adv.tolist() == pytest.approx([0.75, 1.5])


def test_cfol_gives_no_share_to_a_class_without_examples() -> None:
    for mode in ("sampling", "reweighting"):
        policy = started(3, eta=0.1, gamma=0.5, mode=mode)
        for epoch in (1, 2):
            controls = policy.on_epoch_end(errors([4, 0, 6], [10, 0, 10]), ClassStats.zeros(3), epoch)
            shares = controls.weight_adv / 2 if controls.sampling is None else controls.sampling
            assert shares[1] == 0
            assert shares.sum().item() == pytest.approx(1)
            assert 0.25 < shares[0] < shares[2] < 0.75


def test_cfol_keeps_a_class_that_was_not_sampled() -> None:
    policy = started(3, eta=0.1, gamma=0.3)
    policy.on_epoch_end(errors([5, 1, 5], [10, 10, 10]), ClassStats.zeros(3), 1)
    controls = policy.on_epoch_end(errors([5, 0, 5], [15, 0, 15]), ClassStats.zeros(3), 2)
    assert controls.sampling is not None
    assert controls.sampling[1] >= 0.1 - 1e-6


def test_cfol_never_gives_a_class_less_than_its_part_of_gamma() -> None:
    policy = started(100, eta=1.0, gamma=0.2)
    controls = policy.on_epoch_end(errors([50] + [0] * 99, [50] * 100), ClassStats.zeros(100), 1)
    assert controls.sampling is not None
    assert controls.sampling.tolist() == pytest.approx([0.8 + 0.002] + [0.002] * 99)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0}, "eta must be positive, got 0"),
        ({"gamma": 0}, "gamma must be above 0 and at most 1, got 0"),
        ({"gamma": 1.5}, "gamma must be above 0 and at most 1, got 1.5"),
        ({"mode": "smapling"}, "did you mean 'sampling'?"),
    ],
)
def test_cfol_refuses_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        CFOL(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cfol_as_a_spec() -> None:
    policy = build("policy", {"cfol": CFOL}, "cfol:eta=1/4,mode=reweighting")
    assert (policy.eta, policy.gamma, policy.mode) == (0.25, 0.5, "reweighting")
    with pytest.raises(InputError, match="mode = 'weights'"):
        build("policy", {"cfol": CFOL}, "cfol:mode=weights")


def test_training_samples_classes_by_the_distribution_of_cfol(tmp_path: Path) -> None:
    cw.train(
        "digits/madry",
        out=tmp_path,
        policy="cfol:eta=0.01",
        epochs=3,
        attack={"steps": 1},
        validation_per_class=5,
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "sampling" not in records[0]["controls"]
    for record in records[1:]:
        p, n = torch.tensor(record["controls"]["sampling"]), torch.tensor(record["train"]["n"])
        assert p.max() > 1.5 * p.min()
        # each count lies within five standard deviations of its expectation
        assert ((n - n.sum() * p).abs() < 5 * (n.sum() * p * (1 - p)).sqrt()).all()
