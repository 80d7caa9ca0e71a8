"""APGD against Algorithm 1 written out for one image, and against closed forms on linear models."""

# B batch, K classes, D pixels

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from classwise.attacks import APGD, ATTACKS
from classwise.attacks.apgd import CHECK_EVERY, checkpoints, random_start
from classwise.attacks.losses import log_odds, make_loss, margin
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from each import for_each


class Linear(nn.Module):
    """Logits W x + b: the worst case in a ball has a closed form."""

    def __init__(self, num_classes: int, pixels: int = 16, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", torch.randn(num_classes, pixels, generator=random, dtype=torch.float64))
        # All logits are similar at a gray image.
        bias = 0.1 * torch.randn(num_classes, generator=random, dtype=torch.float64)
        self.register_buffer("bias", bias - self.weight.sum(1) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + self.bias


class Curved(nn.Module):
    """A smooth network whose loss is not monotone within a ball; records its inputs."""

    def __init__(self, num_classes: int = 3, pixels: int = 16) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(4)
        self.first: Tensor
        self.last: Tensor
        self.register_buffer("first", 2 * torch.randn(24, pixels, generator=random, dtype=torch.float64))
        self.register_buffer("last", torch.randn(num_classes, 24, generator=random, dtype=torch.float64))
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        return (x.flatten(1) @ self.first.T).sin() @ self.last.T


def images(size: int, seed: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(size, 1, 4, 4, generator=random, dtype=torch.float64)


def predicted(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)


def streams(size: int, seed: int = 0) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(size))


def reachable(model: Linear, x: Tensor, y: Tensor, threat: Threat) -> Tensor:
    """(B, K) largest z_k - z_y in the ball and the box; exact for Linf, and for L2 where the box is out of reach."""
    ball = threat.ball(x)
    gaps = model.weight[None] - model.weight[y][:, None]
    logits = model(x)
    if threat.norm == "Linf":
        low, high = ((bound - x).flatten(1)[:, None] for bound in (ball.low, ball.high))
        gain = torch.maximum(gaps * low, gaps * high).sum(2)
    else:
        gain = threat.eps * gaps.norm(dim=2)
    return (logits - logits.gather(1, y[:, None]) + gain).scatter(1, y[:, None], -torch.inf)


@given(st.integers(1, 400))
@settings(deadline=None)
def test_checkpoints_are_those_of_the_paper(steps: int) -> None:
    shares = [Fraction(0), Fraction(22, 100)]
    while shares[-1] <= 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - Fraction(3, 100), Fraction(6, 100)))
    places = sorted({ceil(share * steps) for share in shares[1:] if share <= 1})
    found = checkpoints(steps)
    assert list(found) == places
    assert [sum(list(found.values())[: j + 1]) for j in range(len(found))] == places


def algorithm_1(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, attack: APGD) -> Tensor:
    """Algorithm 1 of the paper for one image, line by line: every point of the walk is kept and looked up."""
    ball = attack.threat.ball(x)

    def value(point: Tensor) -> float:
        return float({"ce": log_odds, "margin": margin}[attack.loss](y)(model(point)))  # type: ignore[index]

    def ascent(point: Tensor) -> Tensor:
        point = point.clone().requires_grad_()
        {"ce": nn.functional.cross_entropy(model(point), y), "margin": margin(y)(model(point)).sum()}[
            attack.loss
        ].backward()
        assert point.grad is not None
        return point.grad.sign() if attack.threat.norm == "Linf" else point.grad / point.grad.norm()

    step_sizes = [2 * attack.threat.eps]
    points = [start, ball.project(start + step_sizes[0] * ascent(start))]
    values = [value(point) for point in points]
    best_values, last = [values[0]], 0
    for k in range(1, attack.steps + 1):
        best = max(range(k + 1), key=lambda i: values[i])
        best_values.append(values[best])
        step_sizes.append(step_sizes[-1])
        if k in checkpoints(attack.steps):
            rises = sum(values[i + 1] > values[i] for i in range(last, k))
            few = rises < attack.rho * (k - last)
            stuck = last_unchanged(step_sizes, last, k) and best_values[last] == best_values[k]
            if few or stuck:
                step_sizes[k] /= 2
                points[k], values[k] = points[best], values[best]
            last = k
        if k == attack.steps:
            break
        z = ball.project(points[k] + step_sizes[k] * ascent(points[k]))
        points.append(ball.project(points[k] + 0.75 * (z - points[k]) + 0.25 * (points[k] - points[k - 1])))
        values.append(value(points[-1]))
    return points[max(range(len(points)), key=lambda i: values[i])]


def last_unchanged(step_sizes: list[float], last: int, k: int) -> bool:
    """η at w_j-1, before the review there, equals η at w_j."""
    return step_sizes[max(last - 1, 0)] == step_sizes[k]


@for_each("norm", ["Linf", "L2"])
@for_each("loss", ["ce", "margin"])
@for_each(("steps", "rho"), [(1, 0.75), (2, 0.75), (10, 0.75), (50, 0.75), (50, 0.2)])
def test_iterates_equal_those_of_algorithm_1(steps: int, rho: float, loss: Any, norm: Any) -> None:
    """With a small ρ, condition 1 is rare, and condition 2 halves the step size.

    Images are attacked one by one, because a batch may resolve values that are equal up to rounding differently.
    """
    model = Curved()
    attack = APGD(eps=0.04 if norm == "Linf" else 0.15, norm=norm, steps=steps, loss=loss, rho=rho)
    kept = 0
    for number, x in enumerate(images(40, 0).split(1)):
        y, noise = predicted(model, x), ExampleNoise(0, torch.tensor([number]))
        x_adv = attack(model, x, y, generator=noise)
        if not bool(predicted(model, x_adv) == y):
            continue
        kept += 1
        start = random_start(attack.problem(AttackCall(model, x, y, generator=ExampleNoise(0, torch.tensor([number])))))
        assert torch.allclose(x_adv, algorithm_1(model, x, y, start, attack), atol=1e-9, rtol=0)
    assert kept >= 4


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_returns_the_first_misclassified_point_or_else_the_best_one(norm: Any) -> None:
    model = Curved()
    x = images(30, 1)
    y = predicted(model, x)
    attack = APGD(eps=0.03 if norm == "Linf" else 0.1, norm=norm, steps=20)
    outcomes = []
    for i in range(30):
        model.asked.clear()
        x_adv = attack(model, x[i : i + 1], y[i : i + 1], generator=ExampleNoise(0, torch.tensor([i])))
        walk = torch.cat(model.asked)
        logits = model(walk)
        wrong = (logits.argmax(1) != y[i]).nonzero().flatten()
        kept = int(wrong[0]) if len(wrong) else int(log_odds(y[i].expand(len(walk)))(logits).argmax())
        assert torch.allclose(x_adv[0], walk[kept], atol=1e-12, rtol=0)
        # A broken image is dropped at the next check; other images take every step.
        assert len(walk) == (max(CHECK_EVERY, -(-kept // CHECK_EVERY) * CHECK_EVERY) + 1 if len(wrong) else 21)
        outcomes.append(len(wrong) > 0)
    assert 3 <= sum(outcomes) <= 27


def test_broken_examples_take_no_further_passes() -> None:
    model = Curved()
    x = images(200, 2)
    y = predicted(model, x)
    x_adv, effort = APGD(eps=0.03, steps=50).run(AttackCall(model, x, y, generator=streams(200)))
    alive = predicted(model, x_adv) == y
    assert 20 < alive.sum() < 180
    assert (effort.forwards[alive] == 51).all()
    assert (effort.backwards == effort.forwards).all()
    assert effort.forwards[~alive].double().mean() < 20


@for_each("num_classes", [2, 3, 4, 10, 200])
@for_each(("norm", "edge"), [("Linf", 0.0), ("L2", 0.3)])
def test_breaks_exactly_what_can_be_broken_on_a_linear_model(num_classes: int, norm: Any, edge: float) -> None:
    """Towards one class the margin is linear, and its largest value known; in Linf also where the box cuts the ball."""
    model = Linear(num_classes)
    x = images(40, 3, edge, 1 - edge)
    y = predicted(model, x)
    for eps in (0.005 * 1.2**n for n in range(25)):
        threat = Threat.parse(eps, norm)
        possible = reachable(model, x, y, threat).amax(1) > 0
        if possible.sum() > 12:
            break
    assert 12 < possible.sum() < 28
    assert norm == "Linf" or eps < edge
    x_adv = APGD(loss="margin", target="all", steps=6).within(threat)(model, x, y, generator=streams(40))
    assert torch.equal(predicted(model, x_adv) != y, possible)


@given(
    seed=st.integers(0, 2**16),
    num_classes=st.sampled_from([2, 3, 4, 10, 200]),
    norm=st.sampled_from(["Linf", "L2"]),
    eps=st.floats(0.001, 0.2),
    loss=st.sampled_from(["margin", "ce", "dlr"]),
)
@settings(max_examples=20, deadline=None)
def test_reaches_the_worst_case_margin_of_a_linear_model(
    seed: int, num_classes: int, norm: Any, eps: float, loss: Any
) -> None:
    """With a box that does not cut the ball. For two classes every loss maximizes the margin; for more, the margin
    to one target.
    """
    model = Linear(num_classes, seed=seed)
    x = images(10, seed, 0.3, 0.7)
    y = predicted(model, x)
    threat = Threat.parse(eps, norm)
    bound = reachable(model, x, y, threat)
    if num_classes > 2:
        loss = "margin"
    targets = (y + 1) % num_classes
    x_adv = APGD(loss=loss).within(threat)(model, x, y, generator=streams(10), targets=targets)
    logits = model(x_adv)
    reached = make_loss("margin", APGD(eps=eps).problem(AttackCall(model, x, y, targets=targets)))(logits)
    aimed = bound.gather(1, targets[:, None]).squeeze(1)
    assert (reached <= aimed + 1e-9).all()
    alive = logits.argmax(1) == y  # the others stopped when they were broken
    assert torch.allclose(reached[alive], aimed[alive], atol=1e-6, rtol=0)
    assert not (alive & (aimed > 1e-6)).any()


def test_starts_on_the_surface_of_the_ball_clipped_to_the_box() -> None:
    for norm in ("Linf", "L2"):
        attack = APGD(eps=0.1, norm=norm)  # type: ignore[arg-type]
        x = images(50, 5, 0.3, 0.7)
        scale = torch.linspace(0, 2, 50)
        start = random_start(
            attack.problem(AttackCall(Linear(3), x, torch.zeros(50).long(), eps_scale=scale, generator=streams(50)))
        )
        delta = (start - x).flatten(1)
        size = delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1)
        assert torch.allclose(size, 0.1 * scale.double(), atol=1e-12)
        corner = attack.problem(
            AttackCall(Linear(3), torch.zeros_like(x), torch.zeros(50).long(), generator=streams(50))
        )
        assert random_start(corner).amin() == 0
        assert corner.ball.contains(random_start(corner)).all()


def test_radii_may_differ_between_examples() -> None:
    model = Linear(2)
    x = images(60, 6, 0.3, 0.7)
    y = predicted(model, x)
    scale = torch.linspace(0, 2, 60)
    x_adv = APGD(eps=0.1, steps=10)(model, x, y, eps_scale=scale, generator=streams(60))
    assert torch.equal(x_adv[0], x[0])
    margins = torch.stack(
        [reachable(model, x[i : i + 1], y[i : i + 1], Threat.parse(0.1 * float(scale[i]))).amax() for i in range(1, 60)]
    )
    assert torch.equal(predicted(model, x_adv)[1:] != y[1:], margins > 0)


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_confident_models_are_broken_as_well_as_others(loss: Any) -> None:
    """Multiplying the logits changes no prediction, but float32 cross-entropy would saturate."""
    x = images(100, 7).float()
    survived = []
    for scale in (1.0, 1e4):
        model = Linear(4).float()
        model.weight.mul_(scale)
        model.bias.mul_(scale)
        y = predicted(model, x)
        x_adv = APGD(eps=0.05, steps=20, loss=loss)(model, x, y, generator=streams(100))
        survived.append(int((predicted(model, x_adv) == y).sum()))
    assert 10 < survived[0] < 90
    assert survived[1] <= survived[0] + 1


class Restless(nn.Module):
    """Two classes by the sign of w · x, and weights that differ in every pass by far more than w."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.linspace(-1, 1, 16, dtype=torch.float64))
        self.spread, self.random, self.passes = spread, torch.Generator().manual_seed(0), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        weight = self.weight + self.spread * torch.randn(16, generator=self.random, dtype=torch.float64)
        z = (x.flatten(1) - 0.5) @ weight
        return torch.stack([z, -z], 1)


def test_averages_gradients_of_randomized_models() -> None:
    x = images(100, 8, 0.4, 0.6)
    x = x[((x.flatten(1) - 0.5) @ Restless(0).weight) > 0.1]
    y = torch.zeros(len(x)).long()
    margins = {}
    for eot in (1, 30):
        model = Restless(3.0)
        attack = APGD(eps=0.02, steps=10, loss="margin", eot=eot)
        x_adv, effort = attack.run(AttackCall(model, x, y, generator=streams(len(x))))
        assert model.passes == int(effort.backwards.max()) == 11 * eot
        margins[eot] = margin(y)(Restless(0)(x_adv)).mean().item()
    best = reachable_by_sign(x)
    # The gradient of one pass is mostly noise; thirty passes lead most of the way to the corner.
    clean = margin(y)(Restless(0)(x)).mean().item()
    assert margins[30] > clean + 0.5 * (best - clean)
    assert margins[30] > margins[1] + 0.2 * (best - clean)


def reachable_by_sign(x: Tensor) -> float:
    weight = Restless(0).weight
    return float((-2 * ((x.flatten(1) - 0.5) @ weight) + 2 * 0.02 * weight.abs().sum()).mean())


def test_nan_logits_do_not_count_as_misclassified() -> None:
    class Torn(Linear):
        """Returns NaN logits if the first pixel has increased."""

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return torch.where(x[:, 0, 0, :1] > 0.5, torch.nan, logits)

    model = Torn(3)
    x = images(40, 9, 0.3, 0.7)
    x[:, 0, 0, 0] = 0.5
    y = predicted(model, x)
    x_adv = APGD(eps=0.1, steps=10)(model, x, y, generator=streams(40))
    logits = model(x_adv)
    found = logits.isfinite().all(1) & (logits.argmax(1) != y)
    assert found.any()
    assert x_adv.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("apgd:steps=0", "steps = '0': must be at least 1"),
        ("apgd:rho=1", "rho = '1': must be less than 1"),
        ("apgd:rho=0", "rho = '0': must be greater than 0"),
        ("apgd:eot=0", "eot = '0': must be at least 1"),
        ("apgd:num_targets=3", "num_targets needs target=all, got target=None"),
        ("apgd:step_size=0.1", "did you mean 'steps'?"),
    ],
)
def test_invalid_specs_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_of_an_unknown_loss_names_all_losses() -> None:
    """In any order: typing caches equal literals, and with them the order of the first."""
    with pytest.raises(InputError, match="loss = 'kl': must be") as caught:
        build("attack", ATTACKS, "apgd:loss=kl")
    assert all(f"'{loss}'" in str(caught.value) for loss in ("ce", "dlr", "margin"))
    assert "\n" not in str(caught.value)


def test_specs_reach_the_fields() -> None:
    attack = build("attack", ATTACKS, "apgd:loss=dlr,target=all,num_targets=9,steps=20,rho=2/3,eot=4,restarts=2")
    assert attack == APGD(loss="dlr", target="all", num_targets=9, steps=20, rho=2 / 3, eot=4, restarts=2)
