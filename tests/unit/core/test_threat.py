from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import TOLERANCE, Ball, Threat, length
from each import for_each

# What one rounding of a float32 below 1 can do to a coordinate.
ULP = 2**-24


@pytest.mark.parametrize(
    ("eps", "norm", "value", "text"),
    [
        ("8/255", "Linf", 8 / 255, "8/255"),
        (" 8/255 ", "Linf", 8 / 255, "8/255"),
        ("0.031", "Linf", 0.031, "0.031"),
        (0.031, "Linf", 0.031, "0.031"),
        (1, "Linf", 1.0, "1"),
        ("128/255", "L2", 128 / 255, "128/255"),
        (3, "L2", 3.0, "3"),
    ],
)
def test_parse(eps, norm, value, text):
    assert Threat.parse(eps, norm) == Threat(norm, value, text)


def test_equal_numbers_with_other_text_differ():
    assert Threat.parse("1/2") != Threat.parse("0.5")


@for_each(
    ("eps", "norm", "complaint"),
    [
        (0, "Linf", "eps must be a positive number, got 0"),
        ("0/255", "Linf", "eps must be a positive number, got 0/255"),
        (-0.1, "Linf", "eps must be a positive number, got -0.1"),
        ("-8/255", "L2", "eps must be a positive number, got -8/255"),
        ("nan", "Linf", "eps must be a positive number, got nan"),
        (math.inf, "L2", "eps must be a positive number, got inf"),
        ("a/b", "Linf", "eps = 'a/b' is not a number like 0.03 or 8/255"),
        ("8/0", "Linf", "eps = '8/0' is not a number like 0.03 or 8/255"),
        ("eight", "Linf", "eps = 'eight' is not a number like 0.03 or 8/255"),
        ("", "Linf", "eps = '' is not a number like 0.03 or 8/255"),
        (8, "Linf", "eps = 8 is larger than the whole range [0, 1] of a pixel; did you mean 8/255?"),
        ("256/255", "Linf", "eps = 256/255 is larger than the whole range"),
        (0.5, "L3", "unknown norm 'L3': did you mean 'L2'? (known: L2, Linf)"),
        (0.5, "linf", "unknown norm 'linf': did you mean 'Linf'? (known: L2, Linf)"),
    ],
)
def test_parse_errors(eps, norm, complaint):
    with pytest.raises(InputError) as caught:
        Threat.parse(eps, norm)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


@st.composite
def balls(draw, dtype=torch.float32):
    """Balls around images with black, white and gray areas, with different radii."""
    norm = draw(st.sampled_from(["Linf", "L2"]))
    count = draw(st.integers(1, 4))
    shape = draw(st.sampled_from([(1, 1, 1), (1, 3, 2), (1, 8, 8), (3, 32, 32), (3, 80, 80)]))
    eps = draw(st.sampled_from([1 / 255, 8 / 255, 0.3, 1.0] if norm == "Linf" else [0.01, 0.25, 0.5, 3.0, 20.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        center = torch.rand(count, *shape, generator=generator, dtype=dtype) * 1.6 - 0.3
    else:  # one color: every coordinate rounds equally
        center = torch.rand(count, 1, 1, 1, generator=generator, dtype=dtype).expand(count, *shape).clone()
    scale = torch.rand(count, generator=generator, dtype=dtype) * 2 if draw(st.booleans()) else None
    return Threat.parse(eps, norm).ball(center.clamp(0, 1), scale), generator


def moved(ball: Ball, generator: torch.Generator, how: str, distance: float) -> torch.Tensor:
    """Return the center moved by multiples of the radius, in random directions or along all coordinates together."""
    direction = torch.randn(ball.center.shape, generator=generator, dtype=ball.center.dtype)
    if how == "together":
        direction = torch.ones_like(ball.center) * direction.flatten(1)[:, 0].sign().view(-1, 1, 1, 1)
    if ball.norm == "L2":
        direction = direction / length(direction)
    return ball.center + distance * ball.radius * direction


MOVES = {"how": st.sampled_from(["apart", "together"]), "distance": st.sampled_from([0.3, 1.0, 1.5, 40.0])}


@given(made=balls(), **MOVES)
@settings(deadline=None, max_examples=200)
def test_projected_points_are_inside(made, how, distance):
    ball, generator = made
    projected = ball.project(moved(ball, generator, how, distance))
    assert ball.contains(projected).all()
    assert projected.min() >= 0
    assert projected.max() <= 1


@given(made=balls(), **MOVES)
@settings(deadline=None, max_examples=100)
def test_projection_moves_no_farther_than_needed(made, how, distance):
    ball, generator = made
    x = moved(ball, generator, how, distance)
    center, radius = ball.center.double(), ball.radius.double()
    if ball.norm == "Linf":
        expected = torch.maximum(torch.minimum(x.double(), center + radius), center - radius).clamp(0, 1)
    else:
        delta = x.double() - center
        size = delta.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        expected = (center + delta * torch.where(size > radius, radius / size, 1)).clamp(0, 1)
    assert torch.allclose(ball.project(x).double(), expected, rtol=0, atol=4 * ULP)


@given(made=balls(), **MOVES)
@settings(deadline=None, max_examples=100)
def test_projection_is_idempotent(made, how, distance):
    ball, generator = made
    once = ball.project(moved(ball, generator, how, distance))
    twice = ball.project(once)
    if ball.norm == "Linf":
        assert torch.equal(once, twice)
    else:  # the length is rounded, and the sum with the center twice
        assert torch.allclose(once, twice, rtol=0, atol=4 * ULP)


@given(made=balls(), how=MOVES["how"], share=st.floats(0, 0.99))
@settings(deadline=None, max_examples=100)
def test_feasible_points_stay(made, how, share):
    ball, generator = made
    towards = moved(ball, generator, how, share)
    if ball.norm == "Linf":
        delta = (towards - ball.center).clamp(-share * ball.radius, share * ball.radius)
        towards = ball.center + delta
    inside = towards.clamp(0, 1)  # the center lies in the box, so this only comes nearer
    projected = ball.project(inside)
    if ball.norm == "Linf":
        assert torch.equal(projected, inside)
    else:  # center + (x - center) is x but for rounding
        assert torch.allclose(projected, inside, rtol=0, atol=ULP)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_projection_in_double_precision(norm):
    generator = torch.Generator().manual_seed(0)
    center = torch.rand(5, 3, 8, 8, generator=generator, dtype=torch.float64)
    ball = Threat.parse("0.25", norm).ball(center)
    projected = ball.project(center + torch.randn(center.shape, generator=generator, dtype=torch.float64))
    delta = (projected - center).flatten(1)
    size = delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1)
    assert projected.dtype == torch.float64
    assert (size <= 0.25 + 1e-15).all()


def test_l2_projection_keeps_direction_inside_the_box():
    center = torch.full((1, 1, 1, 2), 0.5)
    ball = Threat.parse("0.1", "L2").ball(center)
    projected = ball.project(center + torch.tensor([0.3, 0.4]).view(1, 1, 1, 2))
    assert torch.allclose(projected.flatten(), torch.tensor([0.56, 0.58]), rtol=0, atol=ULP)


def test_length_of_large_images():
    """Lengths of 150528 equal coordinates, where adding up one by one loses four digits."""
    image = torch.full((2, 3, 224, 224), 0.013)
    expected = 0.013 * math.sqrt(3 * 224 * 224)
    assert length(image).shape == (2, 1, 1, 1)
    assert length(image).flatten().tolist() == pytest.approx([expected, expected], rel=1e-6)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_scale_multiplies_radius_and_step(norm):
    center = torch.full((3, 1, 2, 2), 0.5)
    scale = torch.tensor([0.0, 0.5, 2.0])
    ball = Threat.parse("0.1", norm).ball(center, scale)
    assert ball.radius.flatten().tolist() == pytest.approx([0, 0.05, 0.2])
    gradient = torch.ones_like(center)
    for size, expected in ((0.02, [0, 0.01, 0.04]), (9.0, [0, 0.05, 0.2])):
        delta = (ball.step(center, gradient, size) - center).flatten(1)
        reached = delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1)
        assert reached.tolist() == pytest.approx(expected, abs=4 * ULP)


def test_linf_step_is_the_sign():
    center = torch.full((1, 1, 1, 3), 0.5)
    ball = Threat.parse("0.1").ball(center)
    stepped = ball.step(center, torch.tensor([1e-20, -7.0, 0.0]).view(1, 1, 1, 3), 0.03)
    assert (stepped - center).flatten().tolist() == pytest.approx([0.03, -0.03, 0], abs=ULP)


@pytest.mark.parametrize("size", [1e30, 1.0, 1e-5, 1e-14, 1e-30])
def test_l2_step_is_along_the_unit_gradient(size):
    """Gradients may be tiny: the squares of the last are zero in float32."""
    center = torch.full((1, 1, 1, 2), 0.5)
    ball = Threat.parse("0.1", "L2").ball(center)
    stepped = ball.step(center, torch.tensor([3 * size, -4 * size]).view(1, 1, 1, 2), 0.05)
    assert (stepped - center).flatten().tolist() == pytest.approx([0.03, -0.04], abs=ULP)


@given(made=balls())
@settings(deadline=None, max_examples=30)
def test_zero_gradient_moves_nothing(made):
    ball, _ = made
    assert torch.equal(ball.step(ball.center, torch.zeros_like(ball.center), 0.1), ball.center)


@given(made=balls(), size=st.sampled_from([1e-3, 0.1, 10.0]))
@settings(deadline=None, max_examples=60)
def test_steps_stay_inside(made, size):
    ball, generator = made
    x = ball.center
    for _ in range(3):
        x = ball.step(x, torch.randn(x.shape, generator=generator), size)
        assert ball.contains(x).all()


@given(made=balls(), how=st.sampled_from(["uniform", "gaussian", "zero"]), seed=st.integers(0, 2**40))
@settings(deadline=None, max_examples=80)
def test_starts_are_inside(made, how, seed):
    ball, _ = made
    noise = ExampleNoise(seed, torch.arange(len(ball.center)))
    assert ball.contains(ball.start(how, noise)).all()


def test_zero_start_is_a_copy_of_the_center():
    ball = Threat.parse("0.1").ball(torch.rand(2, 1, 2, 2))
    start = ball.start("zero", ExampleNoise(0, torch.arange(2)))
    assert torch.equal(start, ball.center)
    assert start.data_ptr() != ball.center.data_ptr()


N = 20_000


def start_deltas(norm: str, how: str, dimension: int, eps: float = 0.25) -> torch.Tensor:
    """(N, dimension) starting points relative to their center, in balls that the box does not cut."""
    center = torch.full((N, 1, 1, dimension), 0.5)
    start = Threat.parse(eps, norm).ball(center).start(how, ExampleNoise(3, torch.arange(N)))
    return (start - center).flatten(1).double()


def test_linf_uniform_start_is_uniform():
    values = start_deltas("Linf", "uniform", 2).flatten().numpy()
    assert stats.kstest(values, stats.uniform(-0.25, 0.5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dimension", [1, 2, 3, 20])
def test_l2_uniform_start_fills_the_ball(dimension):
    """The share of a ball's volume within radius r is r^d: within half the radius, 1/4 for d = 2."""
    delta = start_deltas("L2", "uniform", dimension)
    share = delta.norm(dim=1) / 0.25
    assert stats.kstest(share.numpy(), lambda r: r**dimension).pvalue > 1e-3
    expected = 0.5**dimension
    assert (share <= 0.5).double().mean() == pytest.approx(expected, abs=4 * math.sqrt(expected / N))
    # Every direction is equally likely.
    assert delta.mean(0).abs().max() < 4 * 0.25 / math.sqrt(N)
    if dimension == 2:
        angle = torch.atan2(delta[:, 0], delta[:, 1]).numpy()
        assert stats.kstest(angle, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-3


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_gaussian_start_is_a_thousandth_wide(norm):
    values = start_deltas(norm, "gaussian", 2).flatten().numpy()
    # Rounding at 0.5 blurs values of this size by less than the test can see.
    assert stats.kstest(values, stats.norm(0, 0.001).cdf).pvalue > 1e-3


def test_contains_rejects_points_outside_the_ball():
    center = torch.full((1, 1, 2, 2), 0.5)
    inf_ball, two_ball = Threat.parse("0.1").ball(center), Threat.parse("0.1", "L2").ball(center)

    def at(ball: Ball, *values: float) -> bool:
        delta = torch.tensor([*values, *[0.0] * (4 - len(values))]).view(1, 1, 2, 2)
        return bool(ball.contains(center + delta))

    assert at(inf_ball, 0.1, -0.1, 0.1, 0.1)
    assert not at(inf_ball, 0.1 + 2 * TOLERANCE)
    assert at(two_ball, 0.1)
    assert at(two_ball, 0.05, 0.05, 0.05, 0.05)
    assert not at(two_ball, 0.1 + 2 * TOLERANCE)
    assert not at(two_ball, 0.1, -0.1, 0.1, 0.1)


@for_each("norm", ["Linf", "L2"])
@for_each("bad", [math.nan, math.inf, -math.inf, -2 * TOLERANCE, 1 + 2 * TOLERANCE])
def test_contains_rejects_points_outside_the_box_and_nan(norm, bad):
    center = torch.full((3, 1, 2, 2), 0.5)
    center[1, 0, 0, 0] = 1 if bad > 0.5 else 0
    x = center.clone()
    x[1, 0, 0, 0] = bad
    assert Threat.parse("0.4", norm).ball(center).contains(x).tolist() == [True, False, True]


def test_contains_rejects_all_nan_and_knows_its_own_radius():
    center = torch.full((2, 3, 4, 4), 0.5)
    ball = Threat.parse("0.1").ball(center, torch.tensor([1.0, 2.0]))
    assert ball.contains(center + 0.15).tolist() == [False, True]
    assert ball.contains(torch.full_like(center, math.nan)).tolist() == [False, False]


def test_contains_is_strict_for_large_images():
    """The allowance for rounding in many coordinates is a fifty-thousandth of the radius, no more."""
    center = torch.full((1, 3, 32, 32), 0.5)
    ball = Threat.parse("0.5", "L2").ball(center)
    direction = torch.randn(center.shape, generator=torch.Generator().manual_seed(0))
    direction /= length(direction)
    assert not ball.contains(center + 0.50001 * direction).any()


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), torch.tensor([True, False, True])], ids=["index", "mask"])
def test_take(rows):
    center = torch.rand(3, 1, 2, 2)
    ball = Threat.parse("0.1", "L2").ball(center, torch.tensor([1.0, 2.0, 3.0]))
    taken = ball.take(rows)
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(taken.project(x[rows]), ball.project(x)[rows])
    assert torch.equal(taken.stretch, ball.stretch[rows])
