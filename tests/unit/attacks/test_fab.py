"""FAB: the projection against other solvers, steps against the formulas, targets, restarts and distances."""

# B batch, D pixels, K classes

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog
from torch import Tensor, nn

from classwise.attacks import ATTACKS, FAB
from classwise.attacks.fab import to_hyperplane
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Norm
from classwise.core.types import AttackCall

NORMS: tuple[Norm, ...] = ("Linf", "L2")


class Linear(nn.Module):
    """Logits W z + b."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0])
        self.layer.weight.data, self.layer.bias.data = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def linear_problem(num_classes: int, size: int = 12, seed: int = 0) -> tuple[Linear, Tensor, Tensor]:
    """A model with boundaries so near, and images so far inside the box, that the box has no effect."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, 24, generator=random, dtype=torch.float64)
    model = Linear(weight, -0.5 * weight.sum(1))
    x = 0.5 + 0.05 * (torch.rand(size, 2, 3, 4, generator=random, dtype=torch.float64) - 0.5)
    with torch.no_grad():
        return model, x, model(x).argmax(1)


def lengths(delta: Tensor, norm: Norm) -> Tensor:
    return delta.flatten(1).abs().amax(1) if norm == "Linf" else delta.flatten(1).norm(dim=1)


def linear_distance(model: Linear, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
    """Return the distance to the nearest hyperplane without a box: the gap in the logits over the dual norm."""
    with torch.no_grad():
        logits, weight = model(x), model.layer.weight
        gaps = weight[None] - weight[y][:, None]
        dual = gaps.abs().sum(2) if norm == "Linf" else gaps.norm(dim=2)
        distance = (logits.gather(1, y[:, None]) - logits) / dual
        return distance.scatter(1, y[:, None], torch.inf).amin(1)


# The projection


@given(
    seed=st.integers(0, 2**16),
    pixels=st.integers(1, 8),
    norm=st.sampled_from(NORMS),
    reach=st.floats(0.0, 0.999),
    sign=st.sampled_from([-1.0, 1.0]),
    degenerate=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_projection_is_the_shortest_step_to_the_hyperplane(
    seed: int, pixels: int, norm: Norm, reach: float, sign: float, degenerate: bool
) -> None:
    random = np.random.default_rng(seed)
    x, normal = random.uniform(size=pixels), random.normal(size=pixels)
    if degenerate:  # pixels at the edge, equal weights, weights of zero
        x, normal = x.round(), normal.round()
    most = np.sum(np.abs(normal) * np.where(sign * normal < 0, 1 - x, x))
    value = sign * reach * most
    step = to_hyperplane(*(torch.tensor(np.array([v])) for v in (x, normal, value)), norm).numpy()[0]

    assert value + normal @ step == pytest.approx(0, abs=1e-12)
    assert (x + step).min() >= -1e-12
    assert (x + step).max() <= 1 + 1e-12
    if norm == "Linf":
        identity, ones = np.eye(pixels), np.ones((pixels, 1))
        answer = linprog(
            np.append(np.zeros(pixels), 1.0),
            np.block([[identity, -ones], [-identity, -ones]]),
            np.zeros(2 * pixels),
            np.append(normal, 0.0)[None],
            [-value],
            bounds=[*zip(-x, 1 - x, strict=True), (0, None)],
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        # The solver may miss the hyperplane by its tolerance, and that costs it a step of tolerance over weight.
        assert np.abs(step).max() == pytest.approx(answer.fun, abs=1e-9 / max(np.abs(normal).sum(), 1e-3))
    else:
        # The nearest point has δ = clip(t · w) for one t (Karush, Kuhn, Tucker), and w · δ rises with t.
        def clipped(t: float) -> np.ndarray:
            return np.clip(t * normal, -x, 1 - x)

        far = 1 / min(np.abs(normal[normal != 0]), default=1.0)  # where every pixel has met its bound
        t = brentq(lambda t: value + normal @ clipped(t), -far, far, xtol=1e-15)
        assert np.allclose(step, clipped(t), atol=1e-9)


@given(seed=st.integers(0, 2**16), norm=st.sampled_from(NORMS), excess=st.floats(1.001, 1e6))
@settings(max_examples=30, deadline=None)
def test_projection_goes_to_the_corner_where_the_hyperplane_misses_the_box(
    seed: int, norm: Norm, excess: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(5, 9, generator=random, dtype=torch.float64)
    normal = torch.randn(5, 9, generator=random, dtype=torch.float64)
    corner = (normal < 0).double()
    value = excess * (normal * (x - corner)).sum(1)
    assert torch.allclose(x + to_hyperplane(x, normal, value, norm), corner, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_projection_is_finite_for_extreme_numbers(norm: Norm) -> None:
    random = torch.Generator().manual_seed(0)
    x, normal = torch.rand(7, 50, generator=random), torch.randn(7, 50, generator=random)
    value = torch.randn(7, generator=random)
    plain = to_hyperplane(x, normal, value, norm)
    for scale in (1e-30, 1e30):  # squares of these are 0 and infinity in float32
        assert torch.allclose(to_hyperplane(x, scale * normal, scale * value, norm), plain, atol=1e-6)
    nowhere = to_hyperplane(x, torch.zeros_like(normal), value, norm)
    assert torch.equal(nowhere, torch.zeros_like(x))
    assert torch.equal(to_hyperplane(x, normal, torch.zeros(7), norm), torch.zeros_like(x))


@pytest.mark.parametrize("norm", NORMS)
def test_projection_is_exact_where_it_takes_many_passes(norm: Norm) -> None:
    """Weights and rooms over twelve orders of magnitude: Newton's method needs 13 (Linf) and 19 (L2) passes here."""
    scales = 0.5 ** torch.arange(40, dtype=torch.float64)
    x, normal = 1 - scales[None], 1 / scales[None]
    value = -0.999 * (normal * scales).sum(1)
    step = to_hyperplane(x, normal, value, norm)
    pace = torch.ones(40, dtype=torch.float64) if norm == "Linf" else normal[0]
    low, high = torch.zeros(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
    for _ in range(200):  # bisection of the level
        middle = (low + high) / 2
        enough = (normal * torch.minimum(middle * pace, scales)).sum() >= -value
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    assert torch.allclose(step[0], torch.minimum(high * pace, scales), rtol=1e-9)


# The steps


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("target", [None, "most-likely"])
def test_steps_follow_the_formula(norm: Norm, target: str | None) -> None:
    """On a linear model every tangent is the boundary itself, so all iterates lie on one line and are known."""
    model, x, y = linear_problem(2)
    exact = linear_distance(model, x, y, norm)
    place, best = 0.0, np.inf  # along the line, in units of the distance
    for steps in range(1, 6):
        near = abs(1 - place)
        alpha = min(near / (near + 1), 0.1)
        place = (1 - alpha) * (place + 1.05 * (1 - place)) + alpha * 1.05
        best = min(best, place)
        place *= 0.9
        found, distances = FAB(norm=norm, target=target, steps=steps, final_search=0).closest(model, x, y)  # type: ignore[arg-type]
        assert torch.allclose(distances, best * exact, rtol=1e-9)
        assert torch.allclose(lengths(found - x, norm), distances, rtol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_classes", [2, 3, 12])
def test_the_nearest_of_many_boundaries_is_found(norm: Norm, num_classes: int) -> None:
    model, x, y = linear_problem(num_classes)
    found, distances = FAB(norm=norm, steps=20).closest(model, x, y)
    with torch.no_grad():
        assert (model(found).argmax(1) != y).all()
    ratio = distances / linear_distance(model, x, y, norm)
    assert ratio.min() >= 1 - 1e-9
    assert ratio.max() <= 1.001


@pytest.mark.parametrize("norm", NORMS)
def test_the_final_search_never_increases_the_distance(norm: Norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 4)).double()
    x = torch.rand(30, 2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    _, plain = FAB(norm=norm, steps=30, final_search=0).closest(model, x, y)
    found, finer = FAB(norm=norm, steps=30).closest(model, x, y)
    reached = plain.isfinite()
    assert reached.float().mean() > 0.5
    assert (finer[reached] <= plain[reached]).all()
    assert (finer[reached] < 0.999 * plain[reached]).float().mean() > 0.5
    with torch.no_grad():
        assert (model(found).argmax(1) != y)[reached].all()


# The attack


@pytest.mark.parametrize("norm", NORMS)
def test_an_attack_breaks_what_lies_within_the_radius(norm: Norm) -> None:
    model, x, y = linear_problem(3, size=60)
    exact = linear_distance(model, x, y, norm)
    eps = exact.median().item()
    found, effort = FAB(eps=eps, norm=norm).run(AttackCall(model, x, y))
    with torch.no_grad():
        broken = model(found).argmax(1) != y
    clear = (exact - eps).abs() > 1e-6 * eps
    assert torch.equal(broken[clear], (exact < eps)[clear])
    assert (lengths(found - x, norm) <= eps * (1 + 1e-12)).all()
    # Broken examples are dropped after ten steps; the others take all steps, with two backward passes a step.
    assert (effort.backwards[broken & clear] == 2 * 10).all()
    assert (effort.backwards[~broken & clear] == 2 * 100).all()
    assert (effort.forwards[~broken & clear] == 201).all()


def test_a_target_takes_one_backward_pass_per_step() -> None:
    model, x, y = linear_problem(5)
    _, effort = FAB(eps=1e-6, target="most-likely", steps=30).run(AttackCall(model, x, y))
    assert (effort.backwards == 30).all()
    assert (effort.forwards == 1 + 61).all()  # one for the order of the classes


def test_radius_of_each_example() -> None:
    model, x, y = linear_problem(2)
    exact = linear_distance(model, x, y, "Linf")
    scale = torch.tensor([0.0, 0.98, 1.02] * 4, dtype=torch.float64)
    x_adv = torch.cat(
        [
            FAB(eps=d.item(), steps=20)(model, x[i : i + 1], y[i : i + 1], eps_scale=scale[i : i + 1])
            for i, d in enumerate(exact)
        ]
    )
    with torch.no_grad():
        assert torch.equal(model(x_adv).argmax(1) != y, scale > 1)
    assert torch.equal(x_adv[::3], x[::3])


class Step(nn.Module):
    """A model that is constant around 0.5, without a gradient, and predicts another class if the first pixel exceeds
    0.7.
    """

    def forward(self, x: Tensor) -> Tensor:
        rise = (x[:, 0, 0, 0] - 0.6).relu()
        return torch.stack([torch.full_like(rise, 0.1), rise], 1)


@pytest.mark.parametrize("norm", NORMS)
def test_restarts_leave_a_flat_region(norm: Norm) -> None:
    x, y = torch.full((20, 1, 1, 2), 0.5), torch.zeros(20, dtype=torch.long)
    noise = [ExampleNoise(0, torch.arange(20)) for _ in range(3)]
    attack = FAB(eps=0.4, norm=norm, steps=20)
    once = attack(Step(), x, y, generator=noise[0])
    assert torch.equal(once, x)
    often = FAB(eps=0.4, norm=norm, steps=10, restarts=10)
    assert (Step()(often(Step(), x, y, generator=noise[1])).argmax(1) == 1).float().mean() > 0.8
    # Starts for the smallest perturbation are at half of what is known, up to half of the whole box.
    _, distances = often.closest(Step(), x, y, generator=noise[2])
    assert (distances <= 0.2 * 1.05).float().mean() > 0.8
    assert distances.min() >= 0.2 - 1e-6


# The smallest perturbation


def test_misclassified_natural_images_have_distance_zero() -> None:
    model, x, y = linear_problem(3)
    wrong = (y + 1) % 3
    found, distances = FAB(steps=5).closest(model, x, wrong)
    assert torch.equal(found, x)
    assert torch.equal(distances, torch.zeros(len(x), dtype=torch.float64))
    x_adv, effort = FAB(eps=0.1).run(AttackCall(model, x, wrong))
    assert torch.equal(x_adv, x)
    assert (effort.forwards == 1).all()
    assert (effort.backwards == 0).all()


def test_the_distance_is_infinite_if_nothing_is_found() -> None:
    model, x, y = linear_problem(3)
    model.layer.bias.data[0] += 1e6
    found, distances = FAB(steps=5, restarts=2).closest(model, x, torch.zeros_like(y))
    assert torch.equal(found, x)
    assert distances.isinf().all()


@pytest.mark.parametrize("norm", NORMS)
def test_images_of_the_target_class_are_not_attacked(norm: Norm) -> None:
    model, x, y = linear_problem(3)
    found, distances = FAB(norm=norm, target=1, steps=10).closest(model, x, y)
    assert 0 < int((y == 1).sum()) < len(y)
    assert torch.equal(distances.isinf(), y == 1)
    assert torch.equal(found[y == 1], x[y == 1])


@pytest.mark.parametrize("attack", [FAB(restarts=2, steps=12), FAB(norm="L2", target="all", restarts=2, steps=12)])
def test_closest_does_not_depend_on_batching_or_eps(attack: FAB) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 4)).double()
    x = torch.rand(4, 2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    found, distances = attack.closest(model, x, y, generator=ExampleNoise(1, torch.arange(4)))
    assert distances.isfinite().any()
    for i in range(4):
        one = attack.closest(model, x[i : i + 1], y[i : i + 1], generator=ExampleNoise(1, torch.tensor([i])))
        assert torch.allclose(one[0], found[i : i + 1], atol=1e-12, rtol=0)
        assert torch.allclose(one[1], distances[i : i + 1], atol=1e-12, rtol=0)
    bounded = FAB(eps=1e-3, norm=attack.norm, target=attack.target, restarts=2, steps=12)
    again = bounded.closest(model, x, y, generator=ExampleNoise(1, torch.arange(4)))
    assert torch.equal(again[0], found)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_closest_restores_the_model(context: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 4))
    x, y = torch.rand(6, 2, 3, 4), torch.randint(4, (6,))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x_before = x.clone()
    expected = FAB(steps=5).closest(model, x, y)
    with context():
        found, distances = FAB(steps=5).closest(model, x.clone(), y.clone())
    assert torch.equal(found, expected[0])
    assert torch.equal(distances, expected[1])
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(x, x_before)
    empty, none = FAB(norm="L2").closest(model, x[:0], y[:0])
    assert empty.shape == (0, 2, 3, 4)
    assert none.shape == (0,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fab:steps=0", "steps = '0': must be at least 1"),
        ("fab:alpha_max=1.5", "alpha_max = '1.5': must be at most 1"),
        ("fab:eta=0.9", "eta = '0.9': must be at least 1"),
        ("fab:beta=1", "beta = '1': must be less than 1"),
        ("fab:final_search=-1", "final_search = '-1': must be at least 0"),
        ("fab:num_targets=9", "num_targets needs target=all, got target=None"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
