"""Policies that set the radius and the strength of the regularizer, by hand."""

# B batch, K classes

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch

from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, LossTerms, Task, reduce
from classwise.policies import CFA, DAFA, POLICIES, BetaVector, FixedWeights
from each import for_each

ANIMALS = Task(classes=("cat", "dog", "bird"), beta=6.0)


def statistics(
    *, robust: list[float] | None = None, softmax: list[list[float]] | None = None, natural: bool = True
) -> ClassStats:
    """Training statistics of 20 examples a class."""
    made = ClassStats.zeros(len(robust or softmax or ()))
    made.n += 20
    made.n_adv += 20
    if robust is not None:
        made.correct_adv += (20 * torch.tensor(robust, dtype=torch.float64)).round().long()
    if softmax is not None:
        made.softmax_adv += 20 * torch.tensor(softmax, dtype=torch.float64)
    made.loss_nat += 20.0 * natural
    return made


NOTHING = ClassStats.zeros(3)


@pytest.mark.parametrize(
    "given",
    [
        "beta-vector:beta=6+0.5+3",
        'name = "beta-vector"\nbeta = [6, 0.5, 3]',
        'name = "beta-vector"\nbeta = { dog = 0.5, 2 = "6/2" }',
    ],
    ids=["spec", "list", "table"],
)
def test_beta_of_each_class_by_hand(given: str) -> None:
    """beta = 6 and 6, 0.5, 3 for the classes: scales 1, 1/12 and 1/2, from the first epoch to the last."""
    policy = build("policy", POLICIES, tomllib.loads(given) if "\n" in given else given)
    controls = policy.start(ANIMALS)
    assert controls.beta_scale.tolist() == pytest.approx([1, 1 / 12, 1 / 2])
    assert policy.on_epoch_end(statistics(robust=[0.1, 0.2, 0.3]), NOTHING, 1) is None


def test_beta_vector_is_equation_5() -> None:
    """CE_i + beta_y · KL_i: (1 + 6 · 2 + 3 + 0.5 · 4) / 2 = 9 for examples of classes 0 and 1."""
    controls = BetaVector(beta=(6.0, 0.5, 6.0)).start(ANIMALS)
    terms = LossTerms(nat=torch.tensor([1.0, 3.0]), adv=torch.tensor([2.0, 4.0]), beta=6.0)
    assert reduce(terms, torch.tensor([0, 1]), controls).item() == pytest.approx(9.0)


@for_each(
    ("beta", "line"),
    [
        ("6+6", "beta must have one number for each of 3 classes, got 2"),
        (6.0, "beta must have one number for each of 3 classes, got 1"),
        ({"dgo": 0.5}, "unknown class 'dgo': did you mean 'dog'"),
        ({"dog": 0.5, "1": 3.0}, "beta contains class 'dog' twice"),
        ({"3": 0.5}, "class 3 does not exist: expected 0 to 2"),
        ("6+6+-1", "beta must be finite and not negative, got -1.0"),
        ({"dog": "inf"}, "beta must be finite and not negative, got inf"),
        ("6+6+nan", "beta must be finite and not negative, got nan"),
        ("cat", "policy 'beta-vector': beta = 'cat': must be a number"),
        ({}, "beta-vector needs beta"),
    ],
    ids=str,
)
def test_beta_vector_refuses_invalid_settings(beta: object, line: str) -> None:
    with pytest.raises(InputError, match=line):
        build("policy", POLICIES, {"name": "beta-vector", "beta": beta}).start(ANIMALS)


def test_beta_vector_needs_a_beta_on_both_sides() -> None:
    with pytest.raises(InputError, match="beta-vector needs beta: one number per class"):
        build("policy", POLICIES, "beta-vector")
    with pytest.raises(InputError, match="needs an objective with beta above 0"):
        BetaVector(beta={"dog": 0.5}).start(Task(classes=ANIMALS.classes, beta=0.0))


def test_fixed_weights_by_hand() -> None:
    """(1, 4, 1) has a mean of 2; a zero leaves a class out."""
    controls = FixedWeights(weights={"dog": 4.0}).start(ANIMALS)
    assert controls.weight_nat.tolist() == controls.weight_adv.tolist() == [0.5, 2.0, 0.5]
    assert FixedWeights(weights=(0.0, 1.0, 2.0)).start(ANIMALS).weight_nat.tolist() == [0.0, 1.0, 2.0]
    terms = LossTerms(nat=torch.tensor([1.0, 3.0]), adv=torch.tensor([2.0, 4.0]), beta=6.0)
    assert reduce(terms, torch.tensor([0, 1]), controls).item() == pytest.approx((0.5 * 13 + 2 * 27) / 2)


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (None, "needs weights"),
        ({"dog": -1.0}, "not negative"),
        ({"dgo": 1.0}, "did you mean 'dog'"),
        ({"dog": 1.0, "1": 2.0}, "weights contains class 'dog' twice"),
        ((0.0, 0.0, 0.0), "must be positive for at least one class"),
        ((1.0, 1.0), "weights must have one number for each of 3 classes, got 2"),
    ],
)
def test_bad_fixed_weights(weights: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        FixedWeights(weights=weights).start(ANIMALS)


def test_cfa_by_hand() -> None:
    """K = 3, beta = 6, lambda1 = 0.5, lambda2 = 0.25, from the second epoch on.

    Epoch 1: nothing. Epoch 2: t = (0.25, 0.75, 0.5), radius (0.75, 1.25, 1), beta scale (0.5, 1, 0.75), so beta_k =
    (3, 6, 4.5) and the weights are 7/4, 7/7 and 7/5.5. Epoch 3: t = (0, 1, 0.25), radius (0.5, 1.5, 0.75), beta scale
    (0.25, 1.25, 0.5), beta_k = (1.5, 7.5, 3), weights 7/2.5, 7/8.5 and 7/4: nothing is carried over.
    """
    policy = CFA(lambda1=0.5, lambda2=0.25, begin=2)
    assert torch.equal(policy.start(ANIMALS).eps_scale, torch.ones(3))
    assert policy.on_epoch_end(statistics(robust=[0.1, 0.2, 0.3]), NOTHING, 1) is None
    rows = [[0.25, 0.75, 0.5], [0.0, 1.0, 0.25]]
    radii = [(0.75, 1.25, 1.0), (0.5, 1.5, 0.75)]
    scales = [(0.5, 1.0, 0.75), (0.25, 1.25, 0.5)]
    weights = [(7 / 4, 1.0, 7 / 5.5), (7 / 2.5, 7 / 8.5, 7 / 4)]
    for epoch, (robust, radius, scale, weight) in enumerate(zip(rows, radii, scales, weights, strict=True), 2):
        controls = policy.on_epoch_end(statistics(robust=robust), NOTHING, epoch)
        assert controls is not None
        assert controls.eps_scale.tolist() == pytest.approx(radius)
        assert controls.beta_scale.tolist() == pytest.approx(scale)
        assert controls.weight_nat.tolist() == pytest.approx(weight)
        assert torch.equal(controls.weight_adv, controls.weight_nat)


def test_cfa_loss_is_that_of_the_paper_times_one_plus_beta() -> None:
    policy = CFA(begin=1)
    policy.start(ANIMALS)
    controls = policy.on_epoch_end(statistics(robust=[0.2, 0.6, 0.9]), NOTHING, 1)
    assert controls is not None
    random = torch.Generator().manual_seed(0)
    nat, adv = torch.rand(2, 9, generator=random)
    y = torch.arange(9) % 3
    beta = 6 * (0.5 + torch.tensor([0.2, 0.6, 0.9]))[y]
    expected = 7 * (nat / (1 + beta) + beta / (1 + beta) * adv).mean()
    found = reduce(LossTerms(nat=nat, adv=adv, beta=6.0), y, controls)
    assert found.item() == pytest.approx(expected.item())


def test_cfa_without_a_natural_term_sets_the_radius_only() -> None:
    policy = CFA(begin=1)
    policy.start(Task(classes=ANIMALS.classes, beta=1.0))
    controls = policy.on_epoch_end(statistics(robust=[0.2, 0.6, 0.9], natural=False), NOTHING, 1)
    assert controls is not None
    assert controls.eps_scale.tolist() == pytest.approx([0.7, 1.1, 1.4])
    for value in (controls.weight_nat, controls.weight_adv, controls.beta_scale):
        assert torch.equal(value, torch.ones(3))


def test_cfa_keeps_a_class_without_examples_at_one() -> None:
    policy, train = CFA(begin=1), statistics(robust=[0.2, 0.6, 0.9])
    policy.start(ANIMALS)
    train.n_adv[1] = train.correct_adv[1] = 0
    controls = policy.on_epoch_end(train, NOTHING, 1)
    assert controls is not None
    assert controls.eps_scale.tolist() == pytest.approx([0.7, 1.0, 1.4])
    assert controls.beta_scale.tolist() == pytest.approx([0.7, 1.0, 1.4])
    assert controls.weight_nat[1] == 1


def test_cfa_begins_after_ten_epochs() -> None:
    policy = CFA()
    policy.start(ANIMALS)
    train = statistics(robust=[0.2, 0.6, 0.9])
    turned = [policy.on_epoch_end(train, NOTHING, epoch) is not None for epoch in range(1, 13)]
    assert turned == [False] * 9 + [True] * 3


def test_dafa_by_hand() -> None:
    """P = (0.5 0.3 0.2 / 0.1 0.8 0.1 / 0.2 0.2 0.6), after two epochs.

    Class 0 gains 0.3 · 0.8 = 0.24 from class 1 and 0.2 · 0.6 = 0.12 from class 2; class 2 gains 0.2 · 0.8 = 0.16 from
    class 1. W = (1 + 0.36, 1 − 0.40, 1 + 0.16 − 0.12) = (1.36, 0.60, 1.04). What comes later changes nothing.
    """
    policy = DAFA(warmup=2)
    policy.start(ANIMALS)
    later = statistics(softmax=[[0.9, 0.1, 0.0], [0.4, 0.5, 0.1], [0.1, 0.1, 0.8]])
    assert policy.on_epoch_end(later, NOTHING, 1) is None
    looked_at = statistics(softmax=[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
    for epoch, train in ((2, looked_at), (3, later), (4, later)):
        controls = policy.on_epoch_end(train, NOTHING, epoch)
        assert controls is not None
        assert controls.eps_scale.tolist() == pytest.approx([1.36, 0.60, 1.04])
        assert torch.equal(controls.weight_nat, controls.eps_scale)
        assert torch.equal(controls.weight_adv, torch.ones(3))


def dafa(softmax: list[list[float]], *, lam: float = 1.0, natural: bool = True) -> ClassControls:
    policy = DAFA(warmup=1, lam=lam)
    policy.start(Task(classes=tuple("abc")[: len(softmax)]))
    controls = policy.on_epoch_end(statistics(softmax=softmax, natural=natural), NOTHING, 1)
    assert controls is not None
    return controls


def test_dafa_weights_the_only_cross_entropy() -> None:
    """Without a natural term that is the adversarial one. Class 0 gains 1.5 · 0.4 · 0.8 = 0.48 from class 1."""
    controls = dafa([[0.6, 0.4], [0.2, 0.8]], lam=1.5, natural=False)
    assert controls.weight_adv.tolist() == pytest.approx([1.48, 0.52])
    assert torch.equal(controls.weight_nat, torch.ones(2))


def test_dafa_skips_ties_and_stays_positive() -> None:
    assert torch.equal(dafa([[0.6, 0.4], [0.4, 0.6]]).eps_scale, torch.ones(2))
    assert dafa([[0.6, 0.4], [0.2, 0.8]], lam=10).eps_scale.tolist() == pytest.approx([4.2, 0.1])


def test_dafa_moves_nothing_to_or_from_a_class_without_examples() -> None:
    """Class 2 is absent: class 0 gains 0.3 · 0.8 = 0.24 from class 1 and nothing else moves."""
    controls = dafa([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.0, 0.0]])
    assert controls.eps_scale.tolist() == pytest.approx([1.24, 0.76, 1.0])


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("cfa:lambda1=0", "lambda1 must be positive, got 0.0"),
        ("cfa:lambda2=-1", "lambda2 must not be negative, got -1.0"),
        ("cfa:begin=0", "begin must be at least 1, as the first epoch has no statistics, got 0"),
        ("dafa:lam=0", "lam must be positive, got 0.0"),
        ("dafa:warmup=0", "warmup must be at least 1, got 0"),
    ],
)
def test_calibration_refuses_invalid_settings(spec: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        build("policy", POLICIES, spec)
