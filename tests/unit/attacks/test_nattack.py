"""NAttack, NES and SPSA: estimates against exact gradients, rewards against their definitions, queries counted."""

# B batch, Q queries an example, K classes

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from classwise.attacks import ATTACKS, NES, SPSA, BallAttack, NAttack, estimation
from classwise.attacks.estimation import antithetic
from classwise.attacks.losses import margin
from classwise.attacks.nattack import rewards_of
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Norm
from classwise.core.types import AttackCall
from each import for_each


class Quadratic(nn.Module):
    """Two logits with difference x·Ax + b·x + c; records the number of images of each pass."""

    def __init__(self, square: Tensor, linear: Tensor, constant: float) -> None:
        super().__init__()
        self.square, self.linear, self.constant = nn.Parameter(square), nn.Parameter(linear), constant
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        flat = x.flatten(1)
        value = ((flat @ self.square) * flat).sum(1) + flat @ self.linear + self.constant
        return torch.stack([torch.zeros_like(value), value], 1)

    def gradient(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return (flat @ (self.square + self.square.T) + self.linear).detach().view_as(x)


class Linear(nn.Module):
    """K logits W (x - 1/2)."""

    def __init__(self, num_classes: int, pixels: int, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(num_classes, pixels, generator=random, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.weight.T


def inner_images(shape: tuple[int, ...], seed: int) -> Tensor:
    return 0.3 + 0.4 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicted(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1)


def stream(size: int, seed: int = 0) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(size))


def quadratic(pixels: int, seed: int, curvature: float = 1.0, constant: float = 0.0) -> Quadratic:
    random = torch.Generator().manual_seed(seed)
    square = curvature * torch.randn(pixels, pixels, generator=random, dtype=torch.float64)
    return Quadratic(square, torch.randn(pixels, generator=random, dtype=torch.float64), constant)


@given(
    size=st.integers(1, 4),
    queries=st.integers(1, 20),
    sigma=st.floats(1e-3, 10.0),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_pairs_measure_the_slope_of_a_quadratic_exactly(size: int, queries: int, sigma: float, seed: int) -> None:
    """(f(x + su) - f(x - su)) / 2s = ∇f(x)·u at any s, so that the estimate is the mean of (∇f·u) u."""
    model = quadratic(12, seed)
    x = inner_images((size, 3, 2, 2), seed)
    problem = NES(eps=0.1).problem(AttackCall(model, x, torch.zeros(size, dtype=torch.long)))
    u = torch.randn(size, queries, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = antithetic(problem, x, u, sigma, margin)
    slopes = torch.einsum("bchw,bqchw->bq", model.gradient(x), u)
    expected = torch.einsum("bq,bqchw->bchw", slopes, u) / queries
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-8)
    assert problem.counter.effort.forwards.tolist() == [2 * queries] * size


def test_an_orthogonal_basis_of_directions_gives_the_gradient_itself() -> None:
    model = quadratic(12, 0)
    x = inner_images((5, 3, 2, 2), 0)
    problem = NES(eps=0.1).problem(AttackCall(model, x, torch.zeros(5, dtype=torch.long)))
    basis = math.sqrt(12) * torch.eye(12, dtype=torch.float64).view(1, 12, 3, 2, 2).expand(5, -1, -1, -1, -1)
    assert torch.allclose(antithetic(problem, x, basis, 0.3, margin), model.gradient(x), rtol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "signs"])
def test_random_directions_give_the_gradient_on_average(kind: str) -> None:
    """The variance of one entry is (‖g‖² ± g_j²) / n, plus for Gaussian directions and minus for signs."""
    pairs, size = 500, 200
    model = quadratic(8, 1)
    x = inner_images((1, 2, 2, 2), 1).expand(size, -1, -1, -1)
    problem = NES(eps=0.1).problem(AttackCall(model, x, torch.zeros(size, dtype=torch.long)))
    like = x[:, None].expand(-1, pairs, -1, -1, -1)
    noise = stream(size, 3)
    u = noise.normal(like) if kind == "gaussian" else torch.where(noise.uniform(like) < 0.5, 1.0, -1.0).to(x)
    found = antithetic(problem, x, u, 0.01, margin).flatten(1)
    gradient = model.gradient(x[:1]).flatten()
    side = 1 if kind == "gaussian" else -1
    variance = (gradient.square().sum() + side * gradient.square()) / pairs
    assert ((found.mean(0) - gradient).abs() < 4.5 * (variance / size).sqrt()).all()
    # A sample variance of 200 normal values has a relative standard deviation of sqrt(2 / 199) = 0.1.
    assert torch.allclose(found.var(0), variance, rtol=0.45)


def test_a_step_of_nes_is_the_sign_of_a_good_estimate() -> None:
    model = quadratic(12, 2, curvature=0.1, constant=-100.0)
    x = inner_images((6, 3, 2, 2), 2)
    y = torch.zeros(6, dtype=torch.long)
    attack = NES(eps=0.1, iterations=1, population=20_000, step_size=0.01, loss="margin")
    moved = attack(model, x, y, generator=stream(6)) - x
    gradient = model.gradient(x)
    clear = gradient.abs() > 5 * gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1) / 100  # five standard errors
    assert clear.double().mean() > 0.7
    assert torch.allclose(moved[clear], 0.01 * gradient.sign()[clear], atol=1e-12)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_spsa_is_adam_on_the_estimates(norm: Norm) -> None:
    """Against torch's Adam, given the same directions, from the same stream."""
    model = quadratic(12, 3, constant=-100.0)
    x = inner_images((4, 3, 2, 2), 3)
    y = torch.zeros(4, dtype=torch.long)
    attack = SPSA(eps=0.05, norm=norm, iterations=12, population=10, step_size=0.01)
    found = attack(model, x, y, generator=stream(4, 5))

    noise, problem = stream(4, 5), attack.problem(AttackCall(model, x, y))
    moving = nn.Parameter(x.clone())
    adam = torch.optim.Adam([moving], lr=0.01, maximize=True)
    for _ in range(12):
        u = torch.where(noise.uniform(x[:, None].expand(-1, 5, -1, -1, -1)) < 0.5, 1.0, -1.0).to(x)
        slopes = torch.einsum("bchw,bqchw->bq", model.gradient(moving), u)
        moving.grad = torch.einsum("bq,bqchw->bchw", slopes, u) / 5
        adam.step()
        moving.data = problem.ball.project(moving.data)
    assert torch.allclose(found, moving.data, atol=1e-7)
    assert not torch.allclose(found, x, atol=1e-2)


def test_nattack_moves_along_the_gradient() -> None:
    """On a slope, Σ A_i z_i / n is the unit gradient g in tanh space; an entry's variance is (1 + g_j²) / n."""
    population = 40_000
    model = quadratic(4, 4, curvature=0.0, constant=-100.0)
    x = inner_images((3, 1, 2, 2), 4)
    y = torch.zeros(3, dtype=torch.long)
    attack = NAttack(eps=0.5, iterations=1, population=population, sigma=1e-3, learning_rate=1e-5)
    problem = attack.problem(AttackCall(model, x, y, generator=stream(3)))
    state = attack.begin(problem)
    (moved,) = attack.step(problem, state, 0)
    direction = (moved - state[0]).flatten(1) * attack.sigma / attack.learning_rate
    # d x / d w = (1 - tanh²) / 2, and the margin's slope in x is the model's
    slope = model.gradient(x).flatten(1) * (1 - state[0].tanh().square()).flatten(1) / 2
    slope = slope / slope.norm(dim=1, keepdim=True)
    error = ((1 + slope.square()) / population).sqrt()
    assert ((direction - slope).abs() < 4.5 * error + 1e-3).all()  # sigma bends the slope by about 1e-3


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_a_step_of_nattack_against_the_formula(norm: Norm) -> None:
    """mu + learning_rate / (n sigma) Σ A_i z_i, written out in numpy with the same draws."""
    model = Linear(4, 18, 5)
    x = inner_images((3, 2, 3, 3), 5)
    y = predicted(model, x)
    attack = NAttack(eps=0.05, norm=norm, iterations=1, population=11)
    found = attack(model, x, y, generator=stream(3, 2)).numpy()

    noise = stream(3, 2)
    mean = np.arctanh((2 * x.numpy() - 1) * (1 - 1e-6)) + 0.001 * noise.normal(x).numpy()
    draws = noise.normal(x[:, None].expand(-1, 11, -1, -1, -1)).numpy()

    def clipped(w: np.ndarray, center: np.ndarray) -> np.ndarray:
        delta = (np.tanh(w) + 1) / 2 - center
        if norm == "Linf":
            return center + np.clip(delta, -0.05, 0.05)
        return center + delta * min(1.0, 0.05 / np.linalg.norm(delta))

    for image, center, label, mu, z in zip(found, x.numpy(), y.tolist(), mean, draws, strict=True):
        members = torch.tensor(np.stack([clipped(mu + 0.1 * one, center) for one in z]))
        with torch.no_grad():
            logits = model(members).numpy()
        reward = -0.5 * np.maximum(logits[:, label] - np.delete(logits, label, axis=1).max(1), 0)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-7)
        moved = mu + 0.02 / (11 * 0.1) * np.einsum("i,ichw->chw", advantage, z)
        assert np.allclose(image, clipped(moved, center), atol=1e-12)


@given(seed=st.integers(0, 2**16), num_classes=st.sampled_from([2, 3, 4, 10, 200]), spread=st.floats(0.1, 5.0))
@settings(max_examples=40, deadline=None)
def test_rewards_match_their_definitions(seed: int, num_classes: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    logits, y = spread * random.standard_normal((3, 7, num_classes)), random.integers(num_classes, size=3)
    probabilities = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    given_logits, labels = torch.tensor(logits), torch.tensor(y)
    for b, label in enumerate(y):
        log_p = np.log(probabilities[b])
        others = np.delete(log_p, label, axis=1)
        stated = -0.5 * np.maximum(log_p[:, label] - others.max(1), 0)
        in_the_code = -0.5 * np.clip(log_p[:, label] - others.max(1)[0], 0, 1000)
        assert np.allclose(rewards_of(given_logits, labels, "margin")[b], stated)
        assert np.allclose(rewards_of(given_logits, labels, "first-member")[b], in_the_code)


class SharedRest(nn.Module):
    """p_y is 0.4 everywhere; how the two other classes share the rest depends on the brightness of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.slope * (x - 0.5).flatten(1).sum(1))
        rest = torch.stack([share, 1 - share], 1)
        return torch.cat([torch.full_like(rest[:, :1], 0.4), 0.6 * rest], 1).log()


def test_the_reward_first_member_ignores_other_wrong_classes() -> None:
    """An image is broken if a wrong class has two thirds of the rest. The probability of the label is uninformative."""
    model = SharedRest()
    x = torch.full((20, 1, 3, 3), 0.5, dtype=torch.float64)
    y = torch.zeros(20, dtype=torch.long)
    attack = NAttack(eps=0.2, iterations=60, population=50)
    broken = {
        reward: int((predicted(model, replace(attack, reward=reward)(model, x, y, generator=stream(20))) != y).sum())
        for reward in ("margin", "first-member")
    }
    assert broken["margin"] == 20
    assert broken["first-member"] <= 2


CHEAP: list[tuple[BallAttack, int]] = [
    (NAttack(iterations=30, population=100), 100),
    (NES(iterations=30, population=60, step_size=0.01), 60),
    (SPSA(iterations=30, population=60, step_size=0.01), 60),
]


@for_each(("attack", "population"), CHEAP, ids=repr)
@for_each("num_classes", [2, 3, 4, 10, 200])
@for_each("norm", ["Linf", "L2"])
def test_breaks_everything_reachable_within_half_the_radius(
    attack: BallAttack, population: int, num_classes: int, norm: Norm
) -> None:
    """Breaks all examples reachable within half the radius and none out of reach; the reported queries are correct."""
    eps = 0.05 if norm == "Linf" else 0.3
    x = inner_images((30, 1, 5, 4), num_classes)
    model = Linear(num_classes, 20, num_classes)
    y = predicted(model, x)
    x_adv, effort = replace(attack, eps=eps, norm=norm).run(AttackCall(model, x, y, generator=stream(30)))
    with torch.no_grad():
        logits = model(x)
        gaps = model.weight[None] - model.weight[y][:, None]
        dual = gaps.abs().sum(2) if norm == "Linf" else gaps.norm(dim=2)
        behind = logits - logits.gather(1, y[:, None])
        reachable = [(behind + r * dual).scatter(1, y[:, None], -torch.inf).amax(1) for r in (eps / 2, eps)]
    broken = predicted(model, x_adv) != y
    assert (reachable[0] > 0).sum() >= 5
    assert broken[reachable[0] > 0].all()
    assert not broken[reachable[1] <= 0].any()
    assert (effort.forwards[~broken] == 30 * (population + 1)).all()
    # A broken example asked for whole steps and one look at the last of them, or was broken by the last step of all.
    whole, looks = effort.forwards // (population + 1), effort.forwards % (population + 1)
    assert ((looks == 1) | (whole == 30))[broken].all()
    assert (whole < 30)[reachable[0] > 0].all()
    assert (effort.backwards == 0).all()


@pytest.mark.parametrize("attack", [attack for attack, _ in CHEAP], ids=repr)
def test_a_misclassified_natural_image_takes_one_query(attack: BallAttack) -> None:
    model = Linear(3, 20, 0)
    x = inner_images((8, 1, 5, 4), 0)
    y = (predicted(model, x) + 1) % 3
    x_adv, effort = replace(attack, eps=1e-4).run(AttackCall(model, x, y, generator=stream(8)))
    assert effort.forwards.tolist() == [1] * 8
    assert (predicted(model, x_adv) != y).all()


@pytest.mark.parametrize(
    "attack", [NAttack(iterations=3, population=40), NES(iterations=3), SPSA(iterations=3, population=40)], ids=repr
)
@pytest.mark.parametrize("limit", [1, 16, 100])
def test_memory_is_bounded_and_does_not_change_the_result(
    attack: BallAttack, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quadratic(12, 6, constant=-100.0)
    x = inner_images((7, 3, 2, 2), 6)
    y = torch.zeros(7, dtype=torch.long)
    bounded = replace(attack, eps=0.1)
    at_once, effort = bounded.run(AttackCall(model, x, y, generator=stream(7)))
    assert max(model.sizes) > 100
    model.sizes.clear()
    monkeypatch.setattr(estimation, "QUERIES_AT_ONCE", limit)
    in_parts, same = bounded.run(AttackCall(model, x, y, generator=stream(7)))
    assert max(model.sizes) <= limit
    assert torch.allclose(in_parts, at_once, atol=1e-12, rtol=0)
    assert torch.equal(effort.forwards, same.forwards)


@pytest.mark.parametrize("attack", [attack for attack, _ in CHEAP], ids=repr)
@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_radii_may_differ_between_examples(attack: BallAttack, norm: Norm) -> None:
    model = quadratic(12, 7, curvature=0.0, constant=-100.0)
    x = inner_images((3, 3, 2, 2), 7)
    scale = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    bounded = replace(attack, eps=0.01, norm=norm)
    x_adv = bounded(model, x, torch.zeros(3, dtype=torch.long), eps_scale=scale, generator=stream(3))
    size = (x_adv - x).flatten(1).norm(math.inf if norm == "Linf" else 2, 1)
    assert torch.allclose(size, 0.01 * scale, rtol=1e-6)


@for_each("logits", [[0.0, 0.0, 0.0], [3e38, -3e38, 0.0], [1e30, 1e30, 0.0]])
@for_each("attack", [*(attack for attack, _ in CHEAP), NAttack(population=9, reward="first-member")])
def test_models_without_gradients_are_supported(attack: BallAttack, logits: list[float]) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor(logits).expand(len(x), -1)

    x = torch.rand(3, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    bounded = replace(attack, eps=0.1, iterations=3)  # type: ignore[call-arg]
    x_adv = bounded(Constant(), x, torch.zeros(3, dtype=torch.long), generator=stream(3))
    assert bounded.threat.ball(x).contains(x_adv).all()


def test_nattack_handles_black_and_white_pixels_in_tanh_space() -> None:
    """In tanh space, black and white pixels are almost at infinity; gray pixels still move."""
    x = torch.tensor([0.0, 1.0, 0.5, 0.5]).repeat(4).view(1, 1, 4, 4)
    model = quadratic(16, 8, curvature=0.0, constant=-100.0).float()
    attack = NAttack(eps=0.1, iterations=20, population=50)
    (w,) = attack.begin(attack.problem(AttackCall(model, x, torch.zeros(1, dtype=torch.long), generator=stream(1))))
    assert w.isfinite().all()
    assert torch.allclose((w.tanh() + 1) / 2, x, atol=2e-3)
    moved = (attack(model, x, torch.zeros(1, dtype=torch.long), generator=stream(1)) - x).abs()
    assert (moved[x == 0.5] > 0.01).all()
    assert (moved[x != 0.5] < 0.001).all()


@for_each(
    ("spec", "message"),
    [
        ("nattack:iterations=0", "iterations = '0': must be at least 1"),
        ("nattack:population=1", "population = '1': must be at least 2"),
        ("nattack:sigma=0", "sigma = '0': must be greater than 0"),
        ("nattack:learning_rate=-1", "learning_rate = '-1': must be greater than 0"),
        ("nattack:reward=logits", "reward = 'logits': must be 'margin' or 'first-member'"),
        ("nes:population=5", "population = '5': must be a multiple of 2"),
        ("nes:sigma=-0.1", "sigma = '-0.1': must be greater than 0"),
        ("nes:step_size=0", "step_size = '0': must be greater than 0"),
        ("nes:loss=kl", "loss = 'kl': must be 'ce' or 'margin'"),
        ("spsa:population=7", "population = '7': must be a multiple of 2"),
        ("spsa:step_size=0", "step_size = '0': must be greater than 0"),
        ("spsa:iteration=7", "did you mean 'iterations'?"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
