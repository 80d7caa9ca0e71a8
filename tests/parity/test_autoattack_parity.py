"""APGD, FAB-T, Square and the standard ensemble against the authors' own code, verdict by verdict.

Attacks agree if at least 99% of the verdicts are equal and no class has more than one additional survivor under ours.
Searches that draw the same random numbers start at the same points. The others run on a network for which the random
start hardly matters, and Square, which always depends on it, runs three times in both implementations.
"""

# B batch, K classes

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from classwise.attacks import APGD, FAB, PGD, AutoAttack, BallAttack, Square
from classwise.core.streams import ExampleNoise
from classwise.data import balanced_subset, load_data, to_float
from classwise.models.load import load_model

LOGGER = logging.getLogger("auto-attack")
"""Theirs warns through it; without one it raises warnings."""


@pytest.fixture(scope="module")
def authors() -> Any:
    """The authors' package: ``autopgd_base``, ``fab_pt`` and ``square``."""
    return pytest.importorskip("pyautoattack.autoattack", reason="pyautoattack is not installed")


@dataclass(frozen=True)
class Case:
    """A model, images that it classifies correctly, and a radius at which some of them survive."""

    model: nn.Module
    x: Tensor
    y: Tensor
    eps: float

    def survivors(self, x_adv: Tensor) -> Tensor:
        """(B,) bool."""
        assert (x_adv - self.x).abs().amax() <= self.eps + 1e-6
        with torch.no_grad():
            return self.model(x_adv).argmax(1) == self.y

    def ours(self, attack: BallAttack, seed: int = 0) -> Tensor:
        noise = ExampleNoise(seed, torch.arange(len(self.y)))
        return self.survivors(attack(self.model, self.x, self.y, generator=noise))

    def theirs(self, attack: type, **settings: Any) -> Tensor:
        """Whether a point lies within the radius; FAB may return points farther out."""
        configured = attack(self.model, norm="Linf", eps=self.eps, device="cpu", **settings)
        return self.survivors(configured.perturb(self.x, self.y))

    def agree(self, ours: Tensor, theirs: Tensor) -> None:
        assert 0.3 * len(self.y) <= theirs.sum() <= 0.7 * len(self.y)
        assert (ours == theirs).double().mean() >= 0.99
        for label in range(10):
            assert ours[self.y == label].sum() <= theirs[self.y == label].sum() + 1


class TinyCNN(nn.Module):
    """Two convolutions on the upper left 8 x 8 pixels: the authors' Square never reaches the last row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :, :8, :8])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def digits() -> Case:
    """A digits network after brief adversarial training."""
    data = load_data("digits", split="train")
    x, y = to_float(data.images), torch.from_numpy(data.labels)
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = TinyCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    attack = PGD(eps=0.15, steps=5)
    for _ in range(150):
        batch = torch.randint(len(x), (256,), generator=random)
        x_adv = attack(model, x[batch], y[batch], generator=random)
        optimizer.zero_grad()
        cross_entropy(model(x_adv), y[batch]).backward()
        optimizer.step()
    test = load_data("digits", split="test")
    return first_correct(model, pad(to_float(test.images), (0, 1, 0, 1)), torch.from_numpy(test.labels), 20, eps=0.14)


def first_correct(model: nn.Module, x: Tensor, y: Tensor, per_class: int, eps: float) -> Case:
    """The first correctly classified images of each class."""
    with torch.no_grad():
        right = (model(x).argmax(1) == y).nonzero().flatten()
    rows = right[torch.from_numpy(balanced_subset(y[right], per_class, 10))]
    assert len(rows) == 10 * per_class
    return Case(model, x[rows], y[rows], eps)


@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_apgd_from_the_same_starts(authors: Any, digits: Case, loss: Any) -> None:
    theirs = digits.theirs(authors.APGDAttack, loss=loss, seed=3, logger=LOGGER)
    torch.manual_seed(3)  # both draw one uniform number for each pixel from torch's global state
    x_adv = APGD(loss=loss, eps=digits.eps)(digits.model, digits.x, digits.y)
    digits.agree(digits.survivors(x_adv), theirs)


def test_l2_apgd_from_the_same_starts(authors: Any, digits: Case) -> None:
    theirs = authors.APGDAttack(digits.model, norm="L2", eps=0.6, seed=3).perturb(digits.x, digits.y)
    torch.manual_seed(3)
    ours = APGD(eps=0.6, norm="L2")(digits.model, digits.x, digits.y)
    assert ((ours - digits.x).flatten(1).norm(dim=1) <= 0.6 + 1e-6).all()
    with torch.no_grad():
        digits.agree(*(digits.model(x_adv).argmax(1) == digits.y for x_adv in (ours, theirs)))


@pytest.fixture(scope="module")
def authors_survivors(authors: Any, digits: Case) -> dict[str, Tensor]:
    """Return the survivors of every attack of the authors' standard ensemble, with fewer steps and queries."""
    square = {"n_queries": QUERIES, "resc_schedule": True}
    squares = [digits.theirs(authors.SquareAttack, seed=seed, **square) for seed in range(3)]
    return {
        "apgd-ce": digits.theirs(authors.APGDAttack, seed=0, logger=LOGGER),
        "apgd-t": digits.theirs(authors.APGDAttack_targeted, seed=0, n_target_classes=9, logger=LOGGER),
        "fab-t": digits.theirs(authors.FABAttack_PT, seed=0, n_iter=50, n_target_classes=9, targeted=True),
        "square": torch.stack(squares).all(0),
    }


QUERIES = 1000
OURS: dict[str, Callable[[Case], Tensor]] = {
    "apgd-t": lambda case: case.ours(APGD(loss="dlr", target="all", num_targets=9, eps=case.eps)),
    "fab-t": lambda case: case.ours(FAB(steps=50, target="all", num_targets=9, eps=case.eps)),
    "square": lambda case: torch.stack([case.ours(Square(queries=QUERIES, eps=case.eps), s) for s in range(3)]).all(0),
    "ensemble": lambda case: case.ours(AutoAttack(queries=QUERIES, eps=case.eps)),
}


@pytest.mark.parametrize("name", OURS)
def test_digits(digits: Case, authors_survivors: dict[str, Tensor], name: str) -> None:
    """The ensemble is the worst case over its attacks; running each on the survivors of the others only saves time."""
    everything = torch.stack(list(authors_survivors.values())).all(0)
    digits.agree(OURS[name](digits), {**authors_survivors, "ensemble": everything}[name])


def test_cifar10(authors: Any, real_data: Path, real_checkpoints: Path) -> None:
    """ResNet-18 trained with TRADES, one image per class, at 8/255, with short budgets: all verdicts are equal.

    The exception is Square, whose verdicts depend on its random numbers at so few queries: it must not be weaker.
    """
    data = load_data("cifar10", split="test")
    rows = balanced_subset(data.labels, 5, 10)
    model = load_model("resnet18", weights=real_checkpoints / "cifar10_resnet18_trades.safetensors")
    case = first_correct(model, to_float(data.images[rows]), torch.from_numpy(data.labels[rows]), 1, eps=8 / 255)
    ours = [
        case.ours(APGD(eps="8/255", steps=20)),
        case.ours(APGD(eps="8/255", steps=20, loss="dlr", target="all", num_targets=2)),
        case.ours(FAB(eps="8/255", steps=10, target="all", num_targets=2)),
        case.ours(Square(eps="8/255", queries=50)),
    ]
    targets = {"n_target_classes": 2, "seed": 0}
    theirs = [
        case.theirs(authors.APGDAttack, n_iter=20, seed=0, logger=LOGGER),
        case.theirs(authors.APGDAttack_targeted, n_iter=20, logger=LOGGER, **targets),
        case.theirs(authors.FABAttack_PT, n_iter=10, targeted=True, **targets),
        case.theirs(authors.SquareAttack, n_queries=50, resc_schedule=True, seed=0),
    ]
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(mine, other)
    assert ours[3].sum() <= theirs[3].sum()
    case.agree(torch.stack(ours).all(0), torch.stack(theirs).all(0))
