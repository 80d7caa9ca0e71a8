"""Policies that set targets: hand-computed rows, how targets are drawn, and how attacks use them."""

# B batch, K classes

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats as distributions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import classwise as cw
from classwise.attacks import PGD
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise, Randomness, draw
from classwise.core.types import AttackCall, ClassControls, ClassStats, Task
from classwise.objectives import Madry, Trades
from classwise.policies.fair_tat import FairTAT
from classwise.policies.targeted import Targeted
from classwise.training.plan import make_plan

ANIMALS = Task(classes=("cat", "dog", "cow"))
EVEN = [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]


def attacked(confusion: list[list[int]]) -> ClassStats:
    """Statistics with these predictions under attack."""
    made = ClassStats.zeros(len(confusion))
    made.confusion_adv += torch.tensor(confusion)
    made.n_adv += made.confusion_adv.sum(1)
    made.correct_adv += made.confusion_adv.diagonal()
    return made


def rows(controls: ClassControls | None) -> list[float]:
    assert controls is not None
    assert controls.targets is not None
    return controls.targets.flatten().tolist()


def near(expected: list[list[float]]) -> Any:
    return pytest.approx([value for row in expected for value in row])


def test_fair_tat_by_hand() -> None:
    """K = 3; with a sharpness of 10 ln 2, a tenth more of the wrong predictions doubles a share.

    First, uniform rows and the plain radius. Epoch 1: of ten wrong predictions (3, 6, 1) went to the classes, shares
    8 : 64 : 2 over the others of each row; robust accuracies (0.6, 0.8, 0.6) give radii (1.1, 1.3, 1.1). Epoch 2:
    nothing wrong, uniform rows, radii 1.5. Epoch 3: all five wrong ones went to class 1, shares 1 : 1024 : 1; class 2
    had no attacked images and keeps its radius.
    """
    policy = FairTAT(sharpness=10 * math.log(2))
    first = policy.start(ANIMALS)
    assert rows(first) == near(EVEN)
    assert torch.equal(first.eps_scale, torch.ones(3))
    course = [
        (
            [[6, 3, 1], [2, 8, 0], [1, 3, 6]],
            [[0, 64 / 66, 2 / 66], [0.8, 0, 0.2], [1 / 9, 8 / 9, 0]],
            (1.1, 1.3, 1.1),
        ),
        ([[9, 0, 0], [0, 9, 0], [0, 0, 9]], EVEN, (1.5, 1.5, 1.5)),
        (
            [[5, 5, 0], [0, 10, 0], [0, 0, 0]],
            [[0, 1024 / 1025, 1 / 1025], [0.5, 0, 0.5], [1 / 1025, 1024 / 1025, 0]],
            (1.0, 1.5, 1.0),
        ),
    ]
    for epoch, (confusion, expected, radii) in enumerate(course, 1):
        controls = policy.on_epoch_end(attacked(confusion), ClassStats.zeros(3), epoch)
        assert rows(controls) == near(expected)
        assert controls.eps_scale.tolist() == pytest.approx(radii)
        assert torch.equal(controls.weight_adv, torch.ones(3))


def test_fair_tat_with_the_papers_settings() -> None:
    """softmax(2 · CFPS) with CFPS = (0.3, 0.6, 0.1)."""
    controls = FairTAT().on_epoch_end(attacked([[6, 3, 1], [2, 8, 0], [1, 3, 6]]), ClassStats.zeros(3), 1)
    a, b, c = (math.exp(2 * share) for share in (0.3, 0.6, 0.1))
    assert rows(controls) == near(
        [[0, b / (b + c), c / (b + c)], [a / (a + c), 0, c / (a + c)], [a / (a + b), b / (a + b), 0]]
    )
    assert FairTAT(lambda_r=0.3).on_epoch_end(
        attacked([[1, 1], [1, 3]]), ClassStats.zeros(2), 1
    ).eps_scale.tolist() == (pytest.approx([0.8, 1.05]))


def test_targeted_finds_the_vulnerable_class_by_hand() -> None:
    """Validation counts add up over the epochs.

    Epoch 1: (4, 5, 2) of 10 are right, class 2 is the lowest. Epoch 2: (0, 5, 6) make (4, 10, 8) of 20, class 0 is the
    lowest. Epoch 3: (6, 5, 2) make (10, 15, 10) of 30: classes 0 and 2 share the lowest, and each aims at the other.
    """
    policy = Targeted()
    assert rows(policy.start(ANIMALS)) == near(EVEN)
    course = [
        ((4, 5, 2), [[0, 0, 1], [0, 0, 1], [0.5, 0.5, 0]]),
        ((0, 5, 6), [[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]]),
        ((6, 5, 2), [[0, 0, 1], [0.5, 0, 0.5], [1, 0, 0]]),
    ]
    for epoch, (correct, expected) in enumerate(course, 1):
        val = ClassStats.zeros(3)
        val.n_adv += 10
        val.correct_adv += torch.tensor(correct)
        controls = policy.on_epoch_end(ClassStats.zeros(3), val, epoch)
        assert rows(controls) == near(expected)
        assert controls is not None
        assert torch.equal(controls.eps_scale, torch.ones(3))


@pytest.mark.parametrize("aim", ["dog", 1, "1"])
def test_targeted_at_one_class(aim: str | int) -> None:
    policy = Targeted(aim=aim)
    assert rows(policy.start(ANIMALS)) == near([[0, 1, 0], [0.5, 0, 0.5], [0, 1, 0]])
    assert policy.on_epoch_end(ClassStats.zeros(3), attacked([[0, 9, 0], [0, 9, 0], [0, 0, 9]]), 1) is None


def test_targeted_skips_classes_without_validation_images() -> None:
    policy = Targeted()
    policy.start(ANIMALS)
    assert rows(policy.on_epoch_end(ClassStats.zeros(3), ClassStats.zeros(3), 1)) == near(EVEN)
    val = attacked([[5, 5, 0], [0, 0, 0], [2, 0, 8]])
    assert rows(policy.on_epoch_end(ClassStats.zeros(3), val, 2)) == near([[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]])


def test_invalid_settings_raise_a_one_line_error() -> None:
    with pytest.raises(InputError, match="lambda_r must be positive, got 0"):
        FairTAT(lambda_r=0)
    with pytest.raises(InputError, match="sharpness must not be negative, got -1"):
        FairTAT(sharpness=-1)
    with pytest.raises(InputError, match="unknown class 'cta': did you mean 'cat'"):
        Targeted(aim="cta").start(ANIMALS)
    with pytest.raises(InputError, match="class 3 does not exist: expected 0 to 2"):
        Targeted(aim=3).start(ANIMALS)


# How targets are drawn.

SHARES = st.lists(st.integers(0, 5), min_size=2, max_size=12).filter(any)


@pytest.mark.parametrize("source", ["generator", "streams"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_distribution(source: str, dtype: torch.dtype) -> None:
    n, shares = 20_000, torch.tensor([0, 0.05, 0.3, 0, 0.5, 0.15, 0], dtype=dtype)
    random: Randomness = torch.Generator().manual_seed(2) if source == "generator" else ExampleNoise(2, torch.arange(n))
    counts = torch.bincount(draw(shares.expand(n, -1), random), minlength=7)
    possible = shares > 0
    assert counts[~possible].sum() == 0
    expected = shares[possible].double() / shares.double().sum()
    assert distributions.chisquare(counts[possible], n * expected).pvalue > 1e-3


class AtThe(ExampleNoise):
    """Noise with the same value everywhere."""

    value: float

    def uniform(self, like: Tensor) -> Tensor:
        return torch.full_like(like, self.value)


def stuck(value: float) -> ExampleNoise:
    noise = AtThe(0, torch.zeros(1, dtype=torch.int64))
    noise.value = value
    return noise


@example(shares=[0, 1, 0, 1, 2], place=16)
@example(shares=[0, 1, 0, 1, 2], place=32)
@given(shares=SHARES, place=st.integers(0, 63))
@settings(deadline=None, max_examples=200)
def test_draws_invert_the_cumulative_distribution(shares: list[int], place: int) -> None:
    """In whole numbers, without rounding: the first class whose cumulated share exceeds the place, of 64 places."""
    (found,) = draw(torch.tensor([shares], dtype=torch.float64), stuck(place / 64)).tolist()
    limits = list(itertools.accumulate(shares))
    assert found == next(label for label, limit in enumerate(limits) if 64 * limit > place * limits[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 2**-24, 1 - 2**-24, 1.0])
@given(shares=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e6)), min_size=2, max_size=12).filter(any))
@settings(deadline=None, max_examples=40)
def test_a_class_of_probability_zero_is_never_drawn(dtype: torch.dtype, value: float, shares: list[float]) -> None:
    """Even if rounding puts the random number at the end or the beginning of all shares."""
    table = torch.tensor([shares, shares[::-1]], dtype=dtype)
    found = draw(table, stuck(value))
    assert (table.gather(1, found[:, None]) > 0).all()


@given(order=st.permutations(range(9)), cuts=st.sets(st.integers(1, 8), max_size=3), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_draws_of_streams_do_not_depend_on_batching(order: list[int], cuts: set[int], seed: int) -> None:
    index = torch.tensor([5, 0, 9_999_999_999, 17, 1, 2, 3, 1000, 31])
    table = torch.rand(9, 50, generator=torch.Generator().manual_seed(0))
    whole = draw(table, ExampleNoise(seed, index))
    for start, end in itertools.pairwise([0, *sorted(cuts), 9]):
        some = torch.tensor(order[start:end])
        assert torch.equal(draw(table[some], ExampleNoise(seed, index[some])), whole[some])


# How attacks take them.


class Linear(nn.Module):
    """Logits in which every pixel belongs to one class."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4 * num_classes, num_classes, bias=False)
        self.layer.weight.data = torch.eye(num_classes).repeat_interleave(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def pictures(size: int = 60, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.rand(size, 1, num_classes, 4, generator=random) / 5 + 0.4, torch.arange(size) % num_classes


@pytest.mark.parametrize("objective", [Madry(), Trades(attack=PGD(steps=10, loss="margin"))], ids=repr)
def test_training_attacks_approach_the_targets_of_the_controls(objective: Madry | Trades) -> None:
    model, (x, y) = Linear(3), pictures()
    objective = replace(objective, attack=replace(objective.attack, eps=0.45))
    controls = Targeted(aim="dog").start(ANIMALS)
    x_adv = objective.perturb(model, x, y, controls, generator=torch.Generator().manual_seed(0))
    found = model(x_adv).argmax(1)
    assert (found[y != 1] == 1).all()
    assert set(found[y == 1].tolist()) == {0, 2}


def test_targets_are_drawn_from_the_random_streams_of_the_attack() -> None:
    model, (x, y) = Linear(3), pictures()
    attack, index = PGD(eps=0.1, steps=3), torch.arange(len(x))
    shares = torch.tensor(EVEN)[y]
    noise = ExampleNoise(4, index)
    classes = draw(shares, noise)
    assert (classes != y).all()
    expected, counted = attack.run(AttackCall(model, x, y, generator=noise, targets=classes))
    found, effort = attack.run(AttackCall(model, x, y, generator=ExampleNoise(4, index), targets=shares))
    assert torch.equal(found, expected)
    # targets given by the caller are validated, which takes a pass; drawn ones are not
    assert counted.forwards.unique().tolist() == [4]
    assert effort.forwards.unique().tolist() == [3]
    parts = [
        attack(model, x[some], y[some], generator=ExampleNoise(4, some), targets=shares[some])
        for some in (index[:7], index[7:])
    ]
    assert torch.equal(torch.cat(parts), found)


@pytest.mark.parametrize("shape", [(2, 3), (3, 1)], ids=str)
def test_targets_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    x, y = pictures(3)
    targets = torch.ones(shape) if shape == (2, 3) else torch.ones(shape, dtype=torch.int64)
    with pytest.raises(InputError, match="expected one target per image, got "):
        PGD(eps=0.1)(Linear(3), x, y, targets=targets)


def test_targeting_does_not_synchronize_with_the_host() -> None:
    """Fake tensors raise an error if a value is read, as in a CUDA graph capture."""
    with FakeTensorMode():
        model, controls = Linear(3), Targeted(aim="dog").start(ANIMALS)
        x, y = torch.empty(8, 1, 3, 4), torch.empty(8, dtype=torch.int64)
        x_adv = Madry(attack=PGD(eps=0.1, steps=2)).perturb(model, x, y, controls)
        assert x_adv.shape == x.shape


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (
            "digits/trades",
            {"policy": "fair-tat"},
            "cannot be combined with objective 'trades': it needs a targeted training attack",
        ),
        ("digits/trades", {"policy": "targeted:aim=3"}, "set loss to ce, margin or dlr in the recipe's attack table"),
        (
            "digits/standard",
            {"policy": "fair-tat"},
            "it needs a training attack",
        ),
        (
            "digits/standard",
            {"policy": "faal"},
            "it needs a training attack",
        ),
        (
            "digits/madry",
            {"policy": "targeted", "objective": "bat"},
            "own attack does not support targets",
        ),
        ("digits/madry", {"policy": "targeted:aim=cat"}, "unknown class 'cat'"),
        (
            "digits/madry",
            {"policy": "targeted", "validation_per_class": 0, "select": "last"},
            "needs validation images",
        ),
    ],
    ids=str,
)
def test_missing_support_for_targets_is_reported_before_training(
    recipe: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(load_recipe(recipe, changes), torch.device("cpu"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["fair-tat", "targeted"])
def test_trades_supports_targets_with_another_loss(policy: str, tmp_path: Path) -> None:
    changes = {"policy": policy, "attack": {"steps": 1, "loss": "ce"}, "epochs": 2, "validation_per_class": 5}
    cw.train("digits/trades", out=tmp_path, **changes)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = (torch.tensor(record["controls"]["targets"]) for record in records)
    assert first.tolist() == (torch.ones(10, 10).sub(torch.eye(10)) / 9).tolist()
    assert not torch.equal(first, second)
    robust = records[0]["validation"]["robust"]["by_class"]
    if policy == "targeted":
        worst = [label for label, value in enumerate(robust) if value == min(robust)]
        assert (second[:, worst].sum(1)[[label for label in range(10) if label not in worst]] > 0.999).all()
    else:
        t = [value / 100 for value in records[0]["train"]["robust"]["by_class"]]
        assert records[1]["controls"]["eps_scale"] == pytest.approx([0.5 + value for value in t], abs=1e-5)
