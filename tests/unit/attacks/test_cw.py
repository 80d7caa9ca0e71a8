"""The attacks of Carlini & Wagner against closed forms: on a linear model the smallest perturbation is known."""

# B batch, D pixels, K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import ATTACKS, CWL2, CWPGD, PGD, BallAttack, CWLinf
from classwise.attacks.carlini_wagner import CarliniWagner
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from each import for_each

# On a linear model so many steps are enough.
LINF = CWLinf(search_steps=5, steps=100, tau_decrease=0.97)
L2 = CWL2(search_steps=6, steps=150, initial_c=0.01)
BOTH = pytest.mark.parametrize("attack", [LINF, L2], ids=["Linf", "L2"])
SLACK = 1.05
"""How far above the smallest distance they may end, where it is more than a few steps of Adam."""
FEW_STEPS = 0.1


class Linear(nn.Module):
    def __init__(self, num_classes: int, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(scale * torch.randn(num_classes, 16, generator=random, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def images(size: int, low: float = 0.3, high: float = 0.7) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return low + (high - low) * torch.rand(size, 1, 4, 4, generator=random, dtype=torch.float64)


def lengths(delta: Tensor, attack: BallAttack) -> Tensor:
    """(...,) of (..., D) vectors."""
    return delta.abs().amax(-1) if attack.norms == ("Linf",) else delta.norm(dim=-1)


@torch.no_grad()
def exact(model: Linear, x: Tensor, y: Tensor, attack: BallAttack) -> Tensor:
    """Return the distance (B, K) of each image to the boundary with each class: the margin over the dual norm.

    A pixel at 0 can only increase and a pixel at 1 only decrease, so only pixels that can move as required count.
    """
    logits = model(x)
    gaps = model.weight[None] - model.weight[y][:, None]
    pixels = x.flatten(1)[:, None]
    stuck = ((pixels == 0) & (gaps < 0)) | ((pixels == 1) & (gaps > 0))
    usable = torch.where(stuck, 0, gaps)
    dual = usable.abs().sum(2) if attack.norms == ("Linf",) else usable.norm(dim=2)
    distance = (logits.gather(1, y[:, None]) - logits) / dual
    return distance.scatter(1, y[:, None], torch.inf)


@torch.no_grad()
def labels(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)


@BOTH
@pytest.mark.parametrize(("num_classes", "scale"), [(2, 1.0), (2, 100.0), (10, 1.0)])
def test_closest_finds_the_smallest_distance(attack: CarliniWagner, num_classes: int, scale: float) -> None:
    """The search also works for large logits, because c is adapted.

    With several classes, the most likely wrong class need not have the nearest boundary, and the search may follow it.
    """
    model, x = Linear(num_classes, seed=1, scale=scale), images(40)
    y = labels(model, x)
    found, distances = attack.closest(model, x, y)
    expected = exact(model, x, y, attack).amin(1)
    assert (distances >= expected - 1e-9).all()
    ratio = (distances / expected)[(expected > FEW_STEPS / 2) & (expected < 0.25)]  # further out, the box cuts the ball
    assert len(ratio) > 5
    assert ratio.median() < SLACK
    if num_classes == 2:
        assert ratio.max() < SLACK
    assert (labels(model, found) != y).all()
    assert torch.allclose(lengths((found - x).flatten(1), attack), distances)


@BOTH
def test_pixels_at_the_edge_of_the_box_move_at_once(attack: CarliniWagner) -> None:
    model, x = Linear(2), images(40, 0, 1).round()
    y = labels(model, x)
    _, distances = attack.closest(model, x, y)
    expected = exact(model, x, y, attack).amin(1)
    clear = (expected > FEW_STEPS) & (expected < 1)
    assert clear.sum() > 20
    assert (distances >= expected - 1e-9).all()
    assert (distances[clear] < SLACK * expected[clear]).all()


@BOTH
def test_breaks_exactly_what_its_ball_can_break(attack: CarliniWagner) -> None:
    model, x = Linear(2, seed=1), images(40)
    y = labels(model, x)
    distance = exact(model, x, y, attack).amin(1)
    clear = (distance > FEW_STEPS / 2) & (distance < 0.25)
    x, y, distance = x[clear], y[clear], distance[clear]
    share = torch.where(torch.arange(len(x)) % 2 == 0, SLACK, 0.97)
    x_adv, effort = attack.within(Threat.parse(1, attack.norms[0])).run(
        AttackCall(model, x, y, eps_scale=share * distance)
    )
    assert torch.equal(labels(model, x_adv) != y, share > 1)
    # Broken examples are dropped; the others take all steps.
    assert effort.forwards[share > 1].double().mean() < effort.forwards[share < 1].double().mean() / 2
    assert torch.equal(effort.forwards, effort.backwards)


@BOTH
def test_a_target_is_reached(attack: CarliniWagner) -> None:
    model, x = Linear(3), images(30)
    y = labels(model, x)
    target = (y + 1) % 3
    rows = torch.arange(len(x))
    x_adv = attack.within(Threat.parse(1, attack.norms[0]))(model, x, y, targets=target)
    reachable = exact(model, x, y, attack)[rows, target] < 0.2
    assert reachable.sum() > 5
    assert torch.equal(labels(model, x_adv)[reachable], target[reachable])

    found, distances = replace(attack, target=2).closest(model, x, y)
    assert torch.equal(distances.isinf(), y == 2)
    assert torch.equal(found[y == 2], x[y == 2])
    assert (labels(model, found)[y != 2] == 2).all()
    assert (distances[y != 2] >= exact(model, x, y, attack)[y != 2, 2] - 1e-9).all()


@BOTH
def test_every_target_in_turn_finds_the_nearest_boundary(attack: CarliniWagner) -> None:
    model, x = Linear(3), images(15)
    y = labels(model, x)
    _, distances = replace(attack, target="all").closest(model, x, y)
    expected = exact(model, x, y, attack).amin(1)
    assert (distances >= expected - 1e-9).all()
    assert (distances / expected)[expected > FEW_STEPS / 2].max() < SLACK


@BOTH
def test_confidence_is_the_margin_of_the_wrong_class(attack: CarliniWagner) -> None:
    model, x = Linear(3), images(20)
    y = labels(model, x)
    found, distances = replace(attack, confidence=1.5).closest(model, x, y)
    with torch.no_grad():
        logits = model(found)
    lead = logits.scatter(1, y[:, None], -torch.inf).amax(1) - logits.gather(1, y[:, None]).squeeze(1)
    done = distances.isfinite()
    assert done.sum() > 15
    assert (lead[done] > 1.5).all()
    assert (lead[done] < 2.5).all()
    assert (distances[done] > attack.closest(model, x, y)[1][done]).all()


@BOTH
def test_misclassified_natural_images_are_unchanged(attack: CarliniWagner) -> None:
    model, x = Linear(4), images(12)
    right = labels(model, x)
    y = torch.where(torch.arange(12) % 3 == 0, right, (right + 1) % 4)
    found, distances = attack.closest(model, x, y)
    assert torch.equal(distances == 0, right != y)
    assert torch.equal(found[right != y], x[right != y])
    x_adv, effort = attack.within(Threat.parse(0.1, attack.norms[0])).run(AttackCall(model, x, y))
    assert torch.equal(x_adv[right != y], x[right != y])
    assert (effort.forwards[right != y] == 1).all()


@BOTH
def test_the_distance_is_infinite_if_nothing_is_found(attack: CarliniWagner) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([1.0, 0.0, 0.0]) + 0 * x.flatten(1).sum(1, keepdim=True)

    x = images(3).float()
    found, distances = attack.closest(Flat(), x, torch.zeros(3, dtype=torch.long))
    assert distances.isinf().all()
    assert torch.equal(found, x)
    nothing, none = attack.closest(Flat(), x[:0], torch.zeros(0, dtype=torch.long))
    assert nothing.shape == (0, 1, 4, 4)
    assert none.shape == (0,)


@BOTH
def test_searches_start_from_equal_logits(attack: CarliniWagner) -> None:
    """At a tie the model predicts the label, the first of the equal classes."""
    weight = torch.tensor([[1.0], [-1.0]]) * torch.ones(2, 4)

    class Tied(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.flatten(1) - 0.5) @ weight.T

    x = torch.full((2, 1, 2, 2), 0.5)
    x_adv = attack.within(Threat.parse(0.1, attack.norms[0]))(Tied(), x, torch.zeros(2, dtype=torch.long))
    assert (Tied()(x_adv).argmax(1) == 1).all()


@BOTH
def test_closest_does_not_depend_on_batching(attack: CarliniWagner) -> None:
    model, x = Linear(4), images(5)
    y = labels(model, x)
    y[2] = (y[2] + 1) % 4
    found, distances = attack.closest(model, x, y)
    for i in (1, 2, 4):
        alone, distance = attack.closest(model, x[i : i + 1], y[i : i + 1])
        assert torch.allclose(alone, found[i : i + 1], atol=1e-12, rtol=0)
        assert torch.allclose(distance, distances[i : i + 1], atol=1e-12, rtol=0)


@BOTH
def test_closest_restores_the_model(attack: CarliniWagner) -> None:
    class Noisy(Linear):
        def __init__(self) -> None:
            super().__init__(3)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    model, x = Noisy().train(), images(5)
    with torch.inference_mode():
        attack.closest(model, x, torch.zeros(5, dtype=torch.long))
    assert model.training
    assert model.drop.training
    assert model.weight.requires_grad
    assert model.weight.grad is None


def test_cw_pgd_is_pgd_on_the_margin() -> None:
    model, x = Linear(5), images(10)
    y = labels(model, x)
    ours = CWPGD(eps="8/255")(model, x, y, generator=ExampleNoise(0, torch.arange(10)))
    same = PGD(eps="8/255", loss="margin", steps=30)(model, x, y, generator=ExampleNoise(0, torch.arange(10)))
    assert torch.equal(ours, same)
    assert build("attack", ATTACKS, "cw-pgd:step_size=0.003") == CWPGD(step_size=0.003)


@for_each(
    ("make", "message"),
    [
        (lambda: CWLinf(norm="L2"), "CWLinf supports Linf only: for L2 use cw-l2"),
        (lambda: CWL2().within(Threat.parse("8/255")), "CWL2 supports L2 only: for Linf use cw-linf"),
        (lambda: CWL2(steps=0), "steps = 0: must be at least 1"),
        (lambda: CWL2(search_steps=0), "search_steps = 0: must be at least 1"),
        (lambda: CWLinf(learning_rate=0), "learning_rate = 0: must be greater than 0"),
        (lambda: CWLinf(initial_c=-1), "initial_c = -1: must be greater than 0"),
        (lambda: CWLinf(tau_decrease=1), "tau_decrease = 1: must be less than 1"),
        (lambda: CWLinf(confidence=-1), "confidence = -1: must be at least 0"),
        (lambda: CWLinf(restarts=2), "restarts must be 1, as CWLinf is deterministic, got 2"),
        (lambda: CWPGD(loss="ce"), "loss = 'ce': must be 'margin'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_settings_raise_a_one_line_error(make: Callable[[], BallAttack], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_norm_is_that_of_the_attack() -> None:
    assert CWL2(eps=0.5).threat == Threat.parse(0.5, "L2")
    assert CWLinf(eps="8/255").threat == Threat.parse("8/255", "Linf")
