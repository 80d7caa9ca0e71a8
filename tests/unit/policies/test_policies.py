"""Every policy: permuted classes, saved state, absent classes, any K, and only the declared statistics and controls."""

# B batch, K classes

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, LossTerms, Policy, Task
from classwise.policies import (
    ABSLD,
    CFA,
    CFOL,
    CSL,
    DAFA,
    FAAL,
    POLICIES,
    WAT,
    BetaVector,
    ChiSquare,
    FairTAT,
    FixedWeights,
    FRLRemargin,
    FRLReweight,
    Targeted,
    Uniform,
)
from each import for_each

# A policy that names a class does so by its name, so that the name goes with the class when classes are permuted.
TABLE: list[Policy] = [
    Uniform(),
    CSL(gamma=0.3),
    CSL(gamma=0.3, critical="class 1"),
    BetaVector(beta={"class 1": 0.5}),
    FixedWeights(weights={"class 1": 2.5}),
    FRLReweight(delta=0.02),
    FRLReweight(delta=0.0, rate=2.0, limit=5.0),
    FRLRemargin(delta=0.02),
    WAT(eta=0.3),
    CFA(begin=2),
    DAFA(warmup=2),
    ChiSquare(rho=0.3),
    ChiSquare(rho=3.0),
    CFOL(eta=0.01),
    CFOL(eta=0.01, mode="reweighting"),
    FAAL(),
    FAAL(radius=0.05),
    FairTAT(),
    Targeted(),
    Targeted(aim="class 1"),
    ABSLD(rate=0.3),
]
SHARED = {"n", "n_nat", "n_adv"}
"""Counts of examples, which any policy may look at."""
PARTS = {"robust": {"correct_adv"}, "natural": {"correct_nat"}}
"""The sums that an accuracy is made of."""


def stats(losses: list[float], n: list[int]) -> ClassStats:
    """Statistics with the given mean losses."""
    made = ClassStats.zeros(len(losses))
    made.n += torch.tensor(n)
    made.loss += torch.tensor(losses, dtype=torch.float64) * made.n
    return made


def task(num_classes: int) -> Task:
    return Task(classes=tuple(f"class {label}" for label in range(num_classes)), beta=6.0)


def fresh(policy: Policy) -> Policy:
    """A fresh copy; the policies of the table are never started."""
    return copy.deepcopy(policy)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A training as a policy sees it: random statistics from a seed, the same for every order of the classes."""

    num_classes: int
    order: Tensor | None = None
    """(K,) which class stands at each place; None leaves them where they are."""
    absent_train: tuple[int, ...] = ()
    absent_val: tuple[int, ...] = ()
    natural: bool = True
    """Whether the objective has a natural term."""
    hide_from: Policy | None = None
    """Spoil all that this policy does not say it uses."""

    @property
    def beta(self) -> float:
        return 6.0 if self.natural else 1.0

    @property
    def places(self) -> Tensor:
        return torch.arange(self.num_classes) if self.order is None else self.order

    @property
    def task(self) -> Task:
        return Task(classes=tuple(f"class {label}" for label in self.places.tolist()), beta=self.beta)

    def stats(self, split: str, epoch: int) -> ClassStats:
        """Full statistics of an epoch, with classes of different difficulty."""
        k, random = self.num_classes, torch.Generator().manual_seed(2 * epoch + (split == "val"))
        made = ClassStats.zeros(k)
        made.n += torch.randint(20, 61, (k,), generator=random)
        made.n[list(self.absent_train if split == "train" else self.absent_val)] = 0
        logits = torch.randn(k, k, generator=random, dtype=torch.float64)
        logits += torch.diag(torch.rand(k, generator=random, dtype=torch.float64) * (2 + math.log(k)))
        softmax = logits.softmax(1)
        drawn = torch.multinomial(softmax, 60, replacement=True, generator=random)
        for label, n in enumerate(made.n.tolist()):
            made.confusion_adv[label] += torch.bincount(drawn[label, :n], minlength=k)
        made.n_adv += made.n
        made.correct_adv += made.confusion_adv.diagonal()
        made.softmax_adv += softmax * made.n[:, None]
        made.ce_adv += -softmax.diagonal().log() * made.n
        made.loss_adv += -softmax.diagonal().log() / self.beta * made.n
        if self.natural or split == "val":
            made.n_nat += made.n
            gained = torch.rand(k, generator=random, dtype=torch.float64) * (made.n - made.correct_adv)
            made.correct_nat += made.correct_adv + gained.long()
            made.ce_nat += gained * made.n_nat / made.n.clamp_min(1)
        if self.natural:
            made.loss_nat += torch.rand(k, generator=random, dtype=torch.float64) * 2 * made.n
        made.loss += made.loss_nat + self.beta * made.loss_adv
        return self.spoil(split, self.permute(made))

    def batch(self, epoch: int, number: int) -> tuple[LossTerms, Tensor]:
        """A batch of an epoch: its terms and its labels."""
        k, random = self.num_classes, torch.Generator().manual_seed(100 * epoch + number)
        present = torch.tensor([label for label in range(k) if label not in self.absent_train])
        y = present[torch.randint(len(present), (32,), generator=random)]
        logits_nat, logits_adv = torch.randn(2, 32, k, generator=random)
        nat, adv = torch.rand(2, 32, generator=random) * 2
        if not self.natural:
            return self.place(LossTerms(nat=0 * nat, adv=adv, beta=1.0, logits_adv=logits_adv), y)
        return self.place(LossTerms(nat=nat, adv=adv, beta=self.beta, logits_nat=logits_nat, logits_adv=logits_adv), y)

    def permute(self, made: ClassStats) -> ClassStats:
        def moved(values: Tensor) -> Tensor:
            return values[self.places] if values.dim() == 1 else values[self.places][:, self.places]

        return ClassStats(**{part.name: moved(getattr(made, part.name)) for part in fields(made)})

    def place(self, terms: LossTerms, y: Tensor) -> tuple[LossTerms, Tensor]:
        logits = {name: getattr(terms, name) for name in ("logits_nat", "logits_adv")}
        moved = {name: value[:, self.places] for name, value in logits.items() if value is not None}
        return self.spoil("batch", replace(terms, **moved)), self.places.argsort()[y]

    def spoil(self, where: str, record: Any) -> Any:
        """The same statistics with other numbers in all fields that a policy declares unused."""
        if self.hide_from is None:
            return record
        used = {name.partition(".")[2] for name in self.hide_from.uses if name.startswith(f"{where}.")}
        used |= {part for name in used for part in PARTS.get(name, ())} | SHARED
        given = {part.name: getattr(record, part.name) for part in fields(record)}
        hidden = [name for name, value in given.items() if name not in used and isinstance(value, Tensor)]
        return replace(record, **{name: 2 * given[name].flip(0) + 1 for name in hidden})


def course(
    policy: Policy, scene: Scene, epochs: Iterable[int] = range(1, 4), controls: ClassControls | None = None
) -> list[ClassControls]:
    """All controls of a training: the first, those of its batches, and those that each epoch leaves."""
    if controls is None:
        controls = policy.start(scene.task)
    seen = [controls]
    for epoch in epochs:
        for number in range(2):
            of_batch = policy.on_batch(*scene.batch(epoch, number))
            seen += [] if of_batch is None else [of_batch]
        following = policy.on_epoch_end(scene.stats("train", epoch), scene.stats("val", epoch), epoch)
        controls = controls if following is None else following
        seen.append(controls)
    return seen


def parts(controls: ClassControls) -> dict[str, Tensor]:
    """The controls that are set, by name."""
    return {part.name: value for part in fields(controls) if (value := getattr(controls, part.name)) is not None}


def assert_equal(one: ClassControls, two: ClassControls, order: Tensor | None = None) -> None:
    """Require equal controls: exactly, or up to permutation and rounding."""
    assert parts(one).keys() == parts(two).keys()
    for name, value in parts(one).items():
        if order is None:
            assert torch.equal(value, parts(two)[name]), name
        else:
            moved = value[order] if value.dim() == 1 else value[order][:, order]
            assert torch.allclose(moved, parts(two)[name], rtol=1e-5, atol=1e-6), name


def assert_sane(controls: ClassControls, num_classes: int) -> None:
    """Require controls that training can use."""
    for name, value in parts(controls).items():
        assert value.shape == ((num_classes, num_classes) if name == "targets" else (num_classes,)), name
        assert value.dtype == torch.float32 or name == "sampling", name
        assert value.isfinite().all(), name
        assert (value >= 0).all(), name
    assert (controls.eps_scale > 0).all()
    if controls.sampling is not None:
        assert controls.sampling.sum().item() == pytest.approx(1, abs=1e-5)
    if controls.targets is not None:
        assert torch.allclose(controls.targets.sum(1), torch.ones(num_classes))
        assert (controls.targets.diagonal() == 0).all()


def test_table_covers_the_registry() -> None:
    assert {type(policy) for policy in TABLE} == set(POLICIES.values())


@for_each("policy", TABLE, ids=repr)
@for_each("num_classes", [2, 10, 100])
@for_each("natural", [True, False], ids=["trades", "madry"])
def test_permuting_classes_permutes_controls(policy: Policy, num_classes: int, natural: bool) -> None:
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(order, torch.arange(num_classes))
    one = course(fresh(policy), Scene(num_classes=num_classes, natural=natural))
    two = course(fresh(policy), Scene(num_classes=num_classes, natural=natural, order=order))
    for plain, permuted in zip(one, two, strict=True):
        assert_sane(plain, num_classes)
        assert_equal(plain, permuted, order)


@for_each("policy", TABLE, ids=repr)
@for_each("stop", [1, 3])
def test_saved_state_continues_the_sequence(policy: Policy, stop: int) -> None:
    scene = Scene(num_classes=5)
    whole, first, second = fresh(policy), fresh(policy), fresh(policy)
    expected = course(whole, scene, range(1, 7))
    left = course(first, scene, range(1, stop + 1))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second.start(scene.task)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    found = course(second, scene, range(stop + 1, 7), controls=left[-1])
    for one, two in zip(expected, left + found[1:], strict=True):
        assert_equal(one, two)


@for_each("policy", TABLE, ids=repr)
def test_start_resets_the_state(policy: Policy) -> None:
    again = fresh(policy)
    course(again, Scene(num_classes=4), range(5, 9))
    for one, two in zip(course(fresh(policy), Scene(num_classes=6)), course(again, Scene(num_classes=6)), strict=True):
        assert_equal(one, two)


@for_each("policy", TABLE, ids=repr)
@for_each("natural", [True, False], ids=["trades", "madry"])
@for_each(("train", "val"), [((), (2,)), ((2,), ()), ((2,), (2,)), ((1,), (2,)), ((), (0, 1, 2, 3))], ids=str)
def test_a_class_without_examples_gives_finite_controls(
    policy: Policy, train: tuple[int, ...], val: tuple[int, ...], natural: bool
) -> None:
    """Controls stay finite, and the loss of the present examples keeps its scale."""
    scene = Scene(num_classes=4, absent_train=train, absent_val=val, natural=natural)
    n = scene.stats("train", 1).n
    for controls in course(fresh(policy), scene):
        assert_sane(controls, 4)
        for weight in (controls.weight_nat, controls.weight_adv):
            assert 1 / 3 < (weight * n).sum() / n.sum() < 3


@for_each("kind", POLICIES.values(), ids=POLICIES.keys())
def test_turns_lists_the_controls_that_change(kind: type[Policy]) -> None:
    plain, moved = parts(ClassControls.uniform(10)), set()
    # What a setting chooses between may turn this or that, so all rows of a policy count together.
    for policy, natural in itertools.product([policy for policy in TABLE if type(policy) is kind], (True, False)):
        for controls in course(fresh(policy), Scene(num_classes=10, natural=natural), range(1, 7)):
            set_to = parts(controls)
            moved |= {name for name in set_to if name not in plain or not torch.equal(set_to[name], plain[name])}
    assert moved == set(kind.turns)


@for_each("policy", TABLE, ids=repr)
@for_each("natural", [True, False], ids=["trades", "madry"])
def test_uses_lists_the_statistics_that_matter(policy: Policy, natural: bool) -> None:
    for name in policy.uses:
        source, _, statistic = name.partition(".")
        assert hasattr({"train": ClassStats, "val": ClassStats, "batch": LossTerms}[source], statistic), name
    scene = Scene(num_classes=5, natural=natural)
    whole, hidden = course(fresh(policy), scene), course(fresh(policy), replace(scene, hide_from=policy))
    for one, two in zip(whole, hidden, strict=True):
        assert_equal(one, two)


@for_each("policy", TABLE, ids=repr)
def test_a_policy_names_its_paper(policy: Policy) -> None:
    assert isinstance(policy, Uniform) or policy.paper[-4:].isdecimal()


def test_wat_weights_by_hand() -> None:
    """K = 2, eta = ln 2, so that each unit of cumulated loss doubles a weight: all numbers are exact fractions.

    Epoch 1: class losses (1, 3), average 2; costs (1, 3, 2); softmax 2:8:4 of 14; class weights 2·2/14 + 4/14 = 8/14
    and 2·8/14 + 4/14 = 20/14. Epoch 2: losses (3, 1), average 2; costs (4, 4, 4): all weights one. Epoch 3: losses
    (0, 2), average 1; costs (4, 6, 5); the ratio 1:4:2 of 7; weights 2·1/7 + 2/7 = 4/7 and 2·4/7 + 2/7 = 10/7.
    """
    policy = WAT(eta=math.log(2))
    assert torch.equal(policy.start(task(2)).weight_nat, torch.ones(2))
    train = stats([1.0, 1.0], [40, 40])
    expected = [(8 / 14, 20 / 14), (1.0, 1.0), (4 / 7, 10 / 7)]
    for epoch, (losses, weights) in enumerate(zip([[1.0, 3.0], [3.0, 1.0], [0.0, 2.0]], expected, strict=True), 1):
        controls = policy.on_epoch_end(train, stats(losses, [10, 10]), epoch)
        assert controls.weight_nat.tolist() == pytest.approx(weights)
        assert torch.equal(controls.weight_adv, controls.weight_nat)
        assert torch.equal(controls.eps_scale, torch.ones(2))


def test_wat_uses_class_means_where_classes_differ_in_size() -> None:
    """Σ_k w_k L_k with L_k a class mean: on classes of 30 and 10 images the weights are w_k · 40 / n_k + w_avg."""
    policy = WAT(eta=math.log(2))
    policy.start(task(2))
    controls = policy.on_epoch_end(stats([1.0, 1.0], [30, 10]), stats([1.0, 3.0], [10, 10]), 1)
    assert controls.weight_nat.tolist() == pytest.approx([2 / 14 * 40 / 30 + 4 / 14, 8 / 14 * 40 / 10 + 4 / 14])
    assert (controls.weight_nat * torch.tensor([30, 10])).sum().item() / 40 == pytest.approx(1.0)


def test_wat_counts_beta_through_the_whole_loss() -> None:
    terms = LossTerms(nat=torch.tensor([1.0, 2.0]), adv=torch.tensor([0.5, 0.25]), beta=6.0)
    assert ClassStats.of(terms, torch.tensor([0, 1]), 2).loss.tolist() == [4.0, 3.5]


def test_wat_refuses_a_rate_that_is_not_positive() -> None:
    with pytest.raises(InputError, match="eta must be positive, got 0"):
        WAT(eta=0)


def test_wat_excludes_a_class_without_examples() -> None:
    policy = WAT(eta=0.3)
    policy.start(task(3))
    controls = policy.on_epoch_end(stats([1.0, 0.0, 1.0], [10, 0, 10]), stats([1.0, 0.0, 2.0], [5, 0, 5]), 1)
    assert (controls.weight_nat * torch.tensor([10, 0, 10])).sum().item() / 20 == pytest.approx(1.0)
    assert controls.weight_nat[2] > controls.weight_nat[0]
