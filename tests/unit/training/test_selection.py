from __future__ import annotations

from typing import get_args

import pytest
import torch

from classwise.core.choices import Rule
from classwise.core.types import ClassStats
from classwise.training.selection import score


def stats(
    n: list[int], natural: list[int], robust: list[int], loss: list[float], n_adv: list[int] | None = None
) -> ClassStats:
    made = ClassStats.zeros(len(n))
    made.n, made.n_nat = torch.tensor(n), torch.tensor(n)
    made.n_adv = torch.tensor(n if n_adv is None else n_adv)
    made.correct_nat, made.correct_adv = torch.tensor(natural), torch.tensor(robust)
    made.loss = torch.tensor(loss, dtype=torch.float64)
    return made


# Natural 28 of 40, robust 16 of 40: by class 6/10, 2/10, none, 8/20.
VAL = stats(n=[10, 10, 0, 20], natural=[9, 4, 0, 15], robust=[6, 2, 0, 8], loss=[12.0, 31.0, 0.0, 30.0])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("robust", 0.4),
        ("worst", 0.2),
        ("robust+worst", 0.6),
        ("natural", 0.7),
        ("worst-loss", -3.1),  # per example, so the class with the most examples does not win by its sum
    ],
)
def test_scores_by_hand_with_absent_class(rule, expected):
    assert score(rule, VAL) == pytest.approx(expected, rel=1e-6)


def test_every_rule_is_known():
    for rule in get_args(Rule):
        assert isinstance(score(rule, VAL), float)


def test_absent_class_is_ignored():
    present = stats(n=[10, 10, 20], natural=[9, 4, 15], robust=[6, 2, 8], loss=[12.0, 31.0, 30.0])
    for rule in get_args(Rule):
        assert score(rule, VAL) == score(rule, present)


def test_class_at_zero_counts():
    hopeless = stats(n=[10, 10], natural=[10, 10], robust=[10, 0], loss=[1.0, 50.0])
    assert score("worst", hopeless) == 0
    assert score("robust+worst", hopeless) == 0.5


def test_rules_prefer_different_epochs():
    """One epoch has the best average, another the best worst class, a third the lowest worst loss."""
    average = stats(n=[10, 10], natural=[9, 9], robust=[9, 2], loss=[5.0, 30.0])
    worst = stats(n=[10, 10], natural=[8, 8], robust=[5, 4], loss=[9.0, 28.0])
    loss = stats(n=[10, 10], natural=[7, 7], robust=[4, 3], loss=[20.0, 20.0])
    epochs = {"average": average, "worst": worst, "loss": loss}
    best = {rule: max(epochs, key=lambda name: score(rule, epochs[name])) for rule in get_args(Rule)}
    assert best == {
        "robust": "average",
        "worst": "worst",
        "robust+worst": "worst",
        "worst-loss": "loss",
        "natural": "average",
        "last": "average",  # a tie: the loop selects the last epoch
    }


def test_robust_rules_use_the_examples_that_were_attacked():
    partly = stats(n=[10, 10], natural=[9, 9], robust=[3, 1], loss=[1.0, 1.0], n_adv=[4, 4])
    assert score("robust", partly) == 0.5
    assert score("worst", partly) == 0.25
