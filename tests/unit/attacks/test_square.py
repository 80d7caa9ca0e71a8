"""Square: the published schedule and shapes, the search step by step, exact answers on linear models, query counts."""

# B batch, K classes, N queries

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from classwise.attacks import ATTACKS, Square, square
from classwise.attacks.losses import log_odds, margin
from classwise.attacks.square import BLOCK, bumps_of
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Norm, Threat
from classwise.core.types import AttackCall
from each import for_each


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable parallel proposals: each proposal waits for the result of the previous one."""
    monkeypatch.setattr(square, "CAPACITY", {False: 0})


class Linear(nn.Module):
    """Logits W x + b; records every queried image."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        return x.flatten(1) @ self.weight.T + self.bias


def linear(num_classes: int, pixels: int, seed: int) -> Linear:
    """A model with equal logits on gray, so that images lie on all sides of the boundaries at various distances."""
    weight = torch.randn(num_classes, pixels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Linear(weight, -weight.sum(1) / 2)


def inner_images(shape: tuple[int, ...], seed: int) -> Tensor:
    """Images so far inside the box that it does not cut the ball."""
    return 0.3 + 0.4 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicted(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1)


def reachable(model: Linear, x: Tensor, y: Tensor, eps: float, norm: Norm) -> Tensor:
    """The largest margin in the ball: against each rival k, z_k - z_y + eps · ‖w_k - w_y‖ in the dual norm."""
    with torch.no_grad():
        logits = model(x)
        gaps = model.weight[None] - model.weight[y][:, None]
        dual = gaps.abs().sum(2) if norm == "Linf" else gaps.norm(dim=2)
        best = logits - logits.gather(1, y[:, None]) + eps * dual
    return best.scatter(1, y[:, None], -torch.inf).amax(1)


def stream(size: int, seed: int = 0) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(size))


@pytest.mark.parametrize(("queries", "side"), [(10_000, 32), (5000, 28), (5000, 224), (300, 8), (1, 8), (2, 2)])
def test_windows_follow_the_published_schedule(queries: int, side: int) -> None:
    """p is halved after 10, 50, 200, 500, 1000, 2000, 4000, 6000 and 8000 of 10000 proposals."""
    expected = []
    for i in range(queries):
        of_ten_thousand = i * 10_000 // queries
        p = 0.8 / 2 ** sum(of_ten_thousand > end for end in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000))
        expected.append(max(1, round(math.sqrt(p * side * side))))
    blocks = list(Square(queries=queries + 1)._blocks(torch.Size([3, side, side]), "Linf"))
    assert [size for size, count in blocks for _ in range(count)] == expected
    assert all(1 <= count <= BLOCK for _, count in blocks)


@pytest.mark.parametrize("shape", [(1, 2, 2), (3, 2, 9), (3, 32, 32), (1, 5, 3)])
@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_windows_fit_the_image(shape: tuple[int, int, int], norm: str) -> None:
    sides = [size for size, _ in Square(queries=2000, p_init=1.0)._blocks(torch.Size(shape), norm)]
    assert max(sides) <= min(shape[1:])
    assert min(sides) == (1 if norm == "Linf" else min(3, *shape[1:]))
    assert norm == "Linf" or all(size % 2 or size == min(shape[1:]) for size in sides)


@for_each("side", range(1, 12))
def test_bumps_match_their_definition(side: int) -> None:
    """Two halves of opposite sign, each the sum over k = 0 … M of 1 / (n + 1 - k)² with M = n - distance."""

    def half(height: int, row: int, column: int) -> float:
        n = max(height, side) // 2
        distance = max(abs(row - height // 2), abs(column - side // 2))
        return sum(1 / (n + 1 - k) ** 2 for k in range(n - distance + 1))

    upper = side // 2
    rows = [[half(upper, r, c) for c in range(side)] for r in range(upper)]
    rows += [[-half(side - upper, r, c) for c in range(side)] for r in range(side - upper)]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected /= expected.norm()
    upright, lying = bumps_of(side, expected).view(2, side, side)
    assert torch.allclose(upright, expected, atol=1e-14)
    assert torch.equal(lying, upright.T)


@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(2, 9),
    width=st.integers(2, 9),
    num_classes=st.sampled_from([2, 3, 4, 10, 200]),
    norm=st.sampled_from(["Linf", "L2"]),
    eps=st.floats(0.01, 0.5),
    queries=st.integers(1, 150),
    loss=st.sampled_from(["margin", "ce"]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.usefixtures("one_at_a_time")
@settings(max_examples=60, deadline=None)
def test_queries_stay_in_the_ball_and_the_best_is_returned(
    channels: int,
    height: int,
    width: int,
    num_classes: int,
    norm: Norm,
    eps: float,
    queries: int,
    loss: str,
    seed: int,
) -> None:
    """The result is the first image that broke the model, or else the one with the largest loss."""
    x = torch.rand(1, channels, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model = linear(num_classes, x[0].numel(), seed)
    y = predicted(model, x)
    model.asked.clear()
    attack = Square(queries=queries, loss=loss).within(Threat.parse(eps, norm))  # type: ignore[arg-type]
    x_adv, effort = attack.run(AttackCall(model, x, y, generator=stream(1, seed)))
    asked = torch.cat(model.asked)
    assert attack.threat.ball(x.expand(asked.shape)).contains(asked).all()
    assert effort.forwards.tolist() == [len(asked)]
    assert effort.backwards.tolist() == [0]
    with torch.no_grad():
        logits = model(asked)
        losses = {"margin": margin, "ce": log_odds}[loss](y.expand(len(asked)))(logits)
        broken = (margin(y.expand(len(asked)))(logits) > 0).nonzero().flatten().tolist()
    kept = asked[broken[0]] if broken else asked[losses.argmax()]
    assert torch.allclose(x_adv[0], kept, atol=1e-12)
    if broken:
        assert len(asked) <= broken[0] + BLOCK
    else:
        assert len(asked) == queries


@pytest.mark.parametrize("seed", range(4))
def test_two_class_linear_model_in_linf_is_solved_exactly(seed: int) -> None:
    """Windows of one pixel find each pixel's better bound, and together these are the best corner of the ball."""
    x = inner_images((40, 1, 4, 5), seed)
    model = linear(2, 20, seed)
    y = predicted(model, x)
    bound = reachable(model, x, y, 0.02, "Linf")
    x_adv = Square(eps=0.02, queries=1500)(model, x, y, generator=stream(40, seed))
    with torch.no_grad():
        reached = margin(y)(model(x_adv))
    assert (bound > 0).any()
    assert (bound < 0).any()
    assert torch.equal(reached > 0, bound > 0)
    assert torch.allclose(reached[bound < 0], bound[bound < 0], atol=1e-9)


@for_each("num_classes", [2, 3, 4, 10, 200])
@for_each("norm", ["Linf", "L2"])
def test_breaks_everything_reachable_within_half_the_radius(num_classes: int, norm: Norm) -> None:
    """Breaks all examples reachable within half the radius, and none out of reach."""
    eps = 0.02 if norm == "Linf" else 0.15
    x = inner_images((60, 1, 6, 6), num_classes)
    model = linear(num_classes, 36, num_classes)
    y = predicted(model, x)
    x_adv = Square(eps=eps, norm=norm, queries=500)(model, x, y, generator=stream(60))
    with torch.no_grad():
        broken = margin(y)(model(x_adv)) > 0
    easy, hard = reachable(model, x, y, eps / 2, norm) > 0, reachable(model, x, y, eps, norm) <= 0
    assert easy.sum() >= 10
    assert hard.any() or num_classes >= 10
    assert broken[easy].all()
    assert not broken[hard].any()


@pytest.mark.parametrize("place", [(0, 0), (0, 4), (6, 0), (6, 4)])
def test_windows_reach_every_corner_of_the_image(place: tuple[int, int]) -> None:
    """A model that depends on one pixel: half of the starts break it, the others need a window at this pixel."""
    weight = torch.zeros(2, 7, 5)
    weight[:, place[0], place[1]] = torch.tensor([1.0, -1.0])
    model = Linear(weight.flatten(1), torch.tensor([-0.9, 0.0]))
    x = torch.full((30, 1, 7, 5), 0.5)
    attack = Square(eps=0.1, queries=600, p_init=1e-6)
    x_adv, effort = attack.run(AttackCall(model, x, torch.zeros(30, dtype=torch.long), generator=stream(30)))
    assert (effort.forwards == 1).any()
    assert (effort.forwards > 1).any()
    assert (predicted(model, x_adv) == 1).all()


@pytest.mark.usefixtures("one_at_a_time")
def test_broken_examples_take_no_further_queries() -> None:
    x = inner_images((50, 1, 6, 6), 1)
    model = linear(4, 36, 1)
    y = predicted(model, x)
    bound = reachable(model, x, y, 0.02, "Linf")
    x_adv, effort = Square(eps=0.02, queries=700).run(AttackCall(model, x, y, generator=stream(50)))
    broken = predicted(model, x_adv) != y
    assert (effort.forwards[~broken] == 700).all()
    assert (effort.forwards[bound <= 0] == 700).all()
    assert (effort.forwards[broken] < 700).all()
    assert effort.forwards.min() == 1


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_finished_examples_do_not_affect_the_others(norm: Norm) -> None:
    x = inner_images((30, 3, 6, 5), 2)
    model = linear(5, 90, 2)
    y = predicted(model, x)
    attack = Square(eps=0.03 if norm == "Linf" else 0.4, norm=norm, queries=400)
    whole, effort = attack.run(AttackCall(model, x, y, generator=ExampleNoise(7, torch.arange(30))))
    assert len(effort.forwards.unique()) > 3
    for i in range(0, 30, 3):
        rows = slice(i, i + 2)
        part, own = attack.run(AttackCall(model, x[rows], y[rows], generator=ExampleNoise(7, torch.arange(30)[rows])))
        assert torch.allclose(part, whole[rows], atol=1e-12, rtol=0)
        assert torch.equal(own.forwards, effort.forwards[rows])


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_windows_and_radii_differ_between_examples(norm: Norm) -> None:
    """The same image under two indices: two different searches. A ball of radius 0 contains only the image."""
    x = inner_images((1, 3, 8, 8), 3).expand(4, -1, -1, -1)
    model = linear(3, 192, 3)
    y = predicted(model, x)
    scale = torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    x_adv = Square(eps=1e-3, norm=norm, queries=50)(model, x, y, eps_scale=scale, generator=stream(4))
    delta = (x_adv - x).flatten(1)
    assert not torch.equal(delta[0], delta[1])
    assert not delta[2].any()
    order = math.inf if norm == "Linf" else 2
    assert torch.allclose(delta.norm(order, 1), 1e-3 * scale, rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_l2_proposals_use_the_whole_radius(channels: int) -> None:
    """Away from the box, every queried image lies on the sphere: the norm removed from one window is added to
    another.
    """
    x = inner_images((6, channels, 9, 7), 4)
    model = linear(3, channels * 63, 4)
    y = predicted(model, x)
    model.asked.clear()
    Square(eps=1e-3, norm="L2", queries=200)(model, x, y, generator=stream(6))
    assert len(model.asked) == 200
    lengths = torch.stack([(asked - x).flatten(1).norm(dim=1) for asked in model.asked])
    assert (lengths < 1e-3 + 1e-12).all()
    # A bump that falls right on its own negative cancels, and that channel's share waits for the next proposal.
    assert (lengths > 1e-3 - 1e-12).double().mean() > 0.99


def test_l2_uses_the_norm_that_the_box_cuts_off() -> None:
    """On a black image, half of every bump is clipped. The model is broken by brightness at any position."""
    x = torch.zeros(5, 1, 8, 8, dtype=torch.float64)
    weight = torch.stack([-torch.ones(64), torch.ones(64)]).double()
    model = Linear(weight, torch.tensor([1e3, 0.0]).double())
    start, end = (
        Square(eps=0.5, norm="L2", queries=queries)(model, x, torch.zeros(5).long(), generator=stream(5)).flatten(1)
        for queries in (1, 600)
    )
    assert (start.norm(dim=1) < 0.8 * 0.5).all()
    assert (end.norm(dim=1) > 0.99 * 0.5).all()
    assert (end.sum(1) > start.sum(1)).all()


class Constant(nn.Module):
    """The same logits whatever the image."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0], [3e38, -3e38, 0.0], [math.nan] * 3, [math.inf, math.inf, 0.0]])
@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_models_without_gradients_are_supported(logits: list[float], norm: Norm) -> None:
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    attack = Square(eps=0.1, norm=norm, queries=70)
    x_adv, effort = attack.run(AttackCall(Constant(logits), x, torch.zeros(3, dtype=torch.long), generator=stream(3)))
    assert attack.threat.ball(x).contains(x_adv).all()
    assert effort.forwards.tolist() == [70, 70, 70]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_draws_stay_inside_the_image_in_any_precision(dtype: torch.dtype, norm: Norm) -> None:
    """A uniform number that rounds up to one would place a window outside."""
    x = torch.rand(64, 1, 6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = linear(3, 24, 0).float()
    x_adv = Square(eps=0.01, norm=norm, queries=150)(model, x, predicted(model, x.float()), generator=stream(64))
    assert x_adv.dtype == dtype
    assert x_adv.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("square:queries=0", "queries = '0': must be at least 1"),
        ("square:p_init=0", "p_init = '0': must be greater than 0"),
        ("square:p_init=1.5", "p_init = '1.5': must be at most 1"),
        ("square:loss=dlr", "loss = 'dlr': must be 'ce' or 'margin'"),
        ("square:steps=5", "unknown setting of attack 'square': 'steps'"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("queries", [1, 2, 7, 150])
@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_evaluating_proposals_ahead_does_not_change_the_result(
    queries: int, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several proposals in one pass give the same search, bit-identical for any number of proposals."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 5, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    x = torch.rand(12, 2, 6, 5)
    y = model(x).argmax(1)
    attack = Square(eps=0.08, queries=queries, loss=loss)
    results = []
    for at_once, least in ((0, 0), (2, 2), (4, 1), (4, 4), (8, 8)):
        monkeypatch.setattr(square, "CAPACITY", {False: at_once * len(x)})
        monkeypatch.setattr(square, "CHEAP", {False: least * len(x)})
        found, effort = attack.run(AttackCall(model, x, y, generator=ExampleNoise(0, torch.arange(len(x)))))
        results.append(found)
        assert (effort.forwards >= 1).all()
    assert all(torch.equal(result, results[0]) for result in results)
    if queries == 150:
        broken = model(results[0]).argmax(1) != y
        assert 0 < broken.sum() < len(y)
