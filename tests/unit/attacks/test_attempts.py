"""Several targets and restarts: sequential and parallel attempts have equal results."""

# B batch, K classes

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import APGD, FAB, PGD, CosinePGD, gradient
from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import margin
from classwise.attacks.problem import Problem
from classwise.core.streams import ExampleNoise
from classwise.core.types import AttackCall

EPS = 0.03


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 4, 40), nn.Tanh(), nn.Linear(40, 5)).eval()


@pytest.fixture(scope="module")
def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.rand(30, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, model(x).argmax(1)


@pytest.mark.parametrize(
    "attack",
    [
        APGD(eps=EPS, steps=8, target="all", num_targets=3, restarts=2),
        FAB(eps=EPS, steps=4, target="all", restarts=3),
        PGD(eps=EPS, steps=3, restarts=5),
        CosinePGD(eps=EPS, steps=6, target="all"),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_attempts_side_by_side_equal_attempts_in_turn(
    attack: GradientAttack, model: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = batch
    results = []
    for room in (1, 70, 10_000):
        monkeypatch.setattr(gradient, "CAPACITY", {False: room})
        results.append(attack(model, x, y, generator=ExampleNoise(0, torch.arange(len(x)))))
    broken = model(results[0]).argmax(1) != y
    assert 0 < broken.sum() < len(y)
    for result in results[1:]:
        assert torch.equal(model(result).argmax(1) != y, broken)
        assert torch.allclose(result, results[0], atol=1e-6)


def test_attempts_start_at_different_points(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    starts = []

    class Recorder(PGD):
        def search(self, problem: Problem) -> Tensor:
            starts.extend(problem.ball.start("uniform", problem.noise).split(len(x)))
            return problem.ball.center

    Recorder(eps=EPS, restarts=3)(model, x, y, generator=ExampleNoise(0, torch.arange(len(x))))
    assert len(starts) == 3
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    alone = PGD(eps=EPS).problem(AttackCall(model, x, y, generator=ExampleNoise(0, torch.arange(len(x)))))
    assert torch.equal(starts[0], alone.ball.start("uniform", alone.noise))


@pytest.mark.parametrize(
    ("attack", "sizes"),
    [
        (CosinePGD(eps=1e-6, steps=2, target="all", num_targets=3, restarts=2), [6]),
        (PGD(eps=1e-6, steps=2, restarts=3), [3]),
        # from the image, then from another point
        (FAB(eps=1e-6, steps=2, target="all", num_targets=3, restarts=3), [3, 6]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_small_batches_run_attempts_of_the_same_kind_together(
    attack: GradientAttack,
    sizes: list[int],
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient, "CAPACITY", {False: 10_000})
    x, y = batch
    seen = []
    plain = Problem.repeated

    def attempts(problem: Problem, numbers: range) -> Problem:
        seen.append(len(numbers))
        return plain(problem, numbers)

    monkeypatch.setattr(Problem, "repeated", attempts)
    attack(model, x, y, generator=ExampleNoise(0, torch.arange(len(x))))
    assert seen == sizes


def test_survivors_return_the_image_of_the_highest_margin(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    together = APGD(eps=EPS, steps=8, target="all")(model, x, y, generator=ExampleNoise(0, torch.arange(len(x))))
    reached = margin(y)(model(together))
    survives = reached <= 0
    assert survives.any()
    order = model(x).scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
    single = []
    for number, aim in enumerate(order[:, :4].unbind(1)):
        noise = ExampleNoise(0, torch.arange(len(x))).fork([number])
        single.append(margin(y)(model(APGD(eps=EPS, steps=8)(model, x, y, generator=noise, targets=aim))))
    assert torch.allclose(torch.stack(single).amax(0)[survives], reached[survives], atol=1e-5)
