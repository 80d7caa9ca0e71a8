"""Square Attack (Andriushchenko et al. 2020): random search that uses only the scores of the model.

Each query changes one square window of the image; the change is kept if it raises the loss. The window covers a share p
of the image, which is halved on a fixed schedule (Algorithm 1).

Linf (Algorithm 2): the search stays on the corners of the ball. It starts from vertical stripes of +-eps; a proposal
sets one window, channel by channel, to one of the two bounds of its pixels. L2 (Algorithm 3): the search stays on the
sphere. It starts from a grid of 5 x 5 bumps; a proposal empties one window and spends the freed norm, and what the box
has cut off, on a bump in another window.

Deviations
* Windows, signs and the orientation of a bump are drawn per example; the authors share one position over the batch,
  which makes the result of an example depend on the others.
* A window may lie anywhere. The authors' code never reaches the last row and column.
* The start counts as one of the ``queries``; in the authors' code it does not.
* An example is broken if a wrong class is strictly ahead. The authors count a tie, which argmax may not.
* The schedule is scaled to the number of queries, and L2 windows have odd sides of at least 3, both as in the authors'
  code. Tiles of the L2 start are a fifth of the shorter side, so that any image of at least two pixels works.
"""

# B batch, C channels, H height, W width, K classes, Q queries, S side of a window; images are flat: (B, C, H * W)

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.problem import WORTH_LEAVING, Problem
from classwise.config.spec import Number
from classwise.core.model_calls import State, Step
from classwise.core.numbers import Count

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries, of ten thousand, after which the share p is halved."""
BLOCK = 64
"""Queries between checks for broken examples, each of which makes a GPU wait."""
CHECK_SHARE = 8
"""Small batches are checked less often: after at least one part in eight of the queries done so far."""
CAPACITY = {False: 100, True: 800}
"""Number of images that keep the device busy; the key is whether it is a GPU."""
CHEAP = {False: 4, True: 160}
"""Number of images up to which a larger pass takes almost no more time; the key is whether it is a GPU."""
MAX_AHEAD = 8
"""Maximum number of proposals per example in one pass. Those after an accepted one are wasted."""
EXPECTED_ACCEPTED = 0.4
"""Expected number of accepted proposals per example in one pass."""
TINY = 1e-24
"""Keeps the direction of an empty window finite."""


@dataclass(frozen=True, kw_only=True)
class Square(BallAttack):
    """Square Attack (Andriushchenko et al. 2020): score-based random search over square windows."""

    black_box: ClassVar[bool] = True

    queries: Count = 5000
    """Maximum number of queries per example. Broken examples are dropped after each block of queries."""
    p_init: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Share of the image that the first windows cover."""
    loss: Literal["ce", "margin"] = "margin"

    def perturb(self, problem: Problem) -> Tensor:
        begin, propose = (stripes, squares) if problem.ball.norm == "Linf" else (tiles, bumps)
        result = problem.ball.center.flatten(2)
        rows = torch.arange(len(result), device=result.device)
        shape = problem.ball.center.shape[1:]
        x, score = begin(problem), self._score(problem.y)
        best = score(problem.logits(x.view(-1, *shape)))
        best = torch.where(best.isnan(), -torch.inf, best)
        if CAPACITY[x.is_cuda] // len(x) > 1 and problem.ball.norm == "Linf":
            return self._ahead(problem, x.view(-1, *shape), best)
        for side, count in self._blocks(shape, problem.ball.norm):
            alive = (best < torch.inf).nonzero().squeeze(1)
            if len(alive) < len(rows):
                result = result.index_copy(0, rows, x)
                rows, problem, x, best = rows[alive], problem.take(alive), x[alive], best[alive]
                score = self._score(problem.y)
                if not len(rows):
                    break
            # Proposals are generated one by one from the current x, which changes in place.
            for candidate in propose(problem, x, side, count):
                scores = score(problem.logits(candidate.view(-1, *shape)))
                better = scores > best
                torch.where(better[:, None, None], candidate, x, out=x)
                best = torch.where(better, scores, best)
        return result.index_copy(0, rows, x).view(-1, *shape)

    def _ahead(self, problem: Problem, x: Tensor, best: Tensor) -> Tensor:
        """Run the same search with several proposals per example in a pass, for batches that do not fill the device.

        Most proposals are rejected. So the next few are evaluated together as if none were accepted; the first better
        one is accepted, and those after it are evaluated again from the changed image. The result is the same.
        """
        result, rows = problem.ball.center.clone(), torch.arange(len(x), device=x.device)
        blocks = list(self._blocks(x.shape[1:], "Linf"))
        draw = torch.cat(
            [draws(problem, count, 2 + x.shape[1]) for _, count in blocks] or [x.new_empty(len(x), 0, 5)], 1
        )
        sides = torch.tensor([side for side, count in blocks for _ in range(count)], device=x.device)
        done = torch.zeros_like(rows)
        ahead, step, accepted = 0, None, best.new_ones(())
        while True:
            alive = (best < torch.inf) & (done < len(sides))
            least = torch.where(alive, done, len(sides)).amin()
            left, least_done, rate = torch.stack([alive.sum(), least, accepted]).tolist()
            if not left:
                return result.index_copy(0, rows, x)
            if len(rows) - left >= WORTH_LEAVING * len(rows):
                result = result.index_copy(0, rows, x)
                rows, problem, draw, step = rows[alive], problem.take(alive), draw[alive], None
                x, best, done = (part[alive] for part in (x, best, done))
            wanted = proposals_ahead(len(rows), rate, x.is_cuda)
            if step is None or wanted != ahead:
                ahead, step = wanted, self._step_ahead(problem, draw, sides, wanted)
            before, queries = done, min(max(BLOCK, least_done // CHECK_SHARE), len(sides) - least_done)
            state = (x, best, done, torch.zeros_like(done))
            x, best, done, hits = problem.repeat(step, state, math.ceil(queries / ahead))
            accepted = hits.sum() / (done - before).sum()

    def _step_ahead(self, problem: Problem, draw: Tensor, sides: Tensor, ahead: int) -> Step:
        """Return the function that evaluates the next proposals of every example and accepts the first better one."""
        score = self._score(problem.y.repeat_interleave(ahead))

        def step(x: Tensor, best: Tensor, done: Tensor, hits: Tensor) -> State:
            query = done[:, None] + torch.arange(ahead, device=x.device)
            known = query.clamp_max(len(sides) - 1)
            numbers = draw.gather(1, known[..., None].expand(-1, -1, draw.shape[2]))
            candidates = windows(problem, x, numbers, sides[known])
            scores = score(problem.logits(candidates.flatten(0, 1))).view_as(known)
            better = (scores > best[:, None]) & (query < len(sides))
            accepted, first = better.any(1), better.long().argmax(1, keepdim=True)
            chosen = candidates.take_along_dim(first[..., None, None, None], 1).squeeze(1)
            x = torch.where(accepted[:, None, None, None], chosen, x)
            best = torch.where(accepted, scores.gather(1, first).squeeze(1), best)
            return x, best, done + torch.where(accepted, first.squeeze(1) + 1, ahead), hits + accepted

        return step

    def _score(self, y: Tensor) -> Loss:
        """Return the function to maximize; it is infinite on broken examples, so that they stay as they are."""

        margin_of, log_odds_of = margin(y), log_odds(y)

        def score(logits: Tensor) -> Tensor:
            margins = margin_of(logits)
            losses = margins if self.loss == "margin" else log_odds_of(logits)
            return losses.masked_fill(margins > 0, torch.inf)

        return score

    def _blocks(self, shape: torch.Size, norm: str) -> Iterator[tuple[int, int]]:
        """Yield the sides of the windows and the number of consecutive proposals with each."""
        total = self.queries - 1

        def side(query: int) -> int:
            share = self.p_init / 2 ** bisect_left(HALVINGS, query * 10_000 // total)
            size = round(math.sqrt(share * shape[1] * shape[2]))
            size = max(size, 1) if norm == "Linf" else max(size + 1 - size % 2, 3)
            return min(size, shape[1], shape[2])

        for size, group in groupby(range(total), side):
            count = len(list(group))
            yield from ((size, min(BLOCK, count - done)) for done in range(0, count, BLOCK))


def proposals_ahead(examples: int, rate: float, gpu: bool) -> int:
    """Return the number of proposals per example to evaluate in one pass, a power of two, given their acceptance rate.

    >>> [proposals_ahead(10, rate, gpu=False) for rate in (0.5, 0.2, 0.05, 0.0)]
    [1, 2, 8, 8]
    """
    most = min(CAPACITY[gpu] // examples, MAX_AHEAD)
    wanted = max(EXPECTED_ACCEPTED / max(rate, EXPECTED_ACCEPTED / MAX_AHEAD), CHEAP[gpu] // examples)
    return 1 << max(int(min(wanted, most)), 1).bit_length() - 1


def stripes(problem: Problem) -> Tensor:
    """Return the start in Linf: every column of every channel at one of its bounds."""
    ball = problem.ball
    channels, _, width = ball.center.shape[1:]
    up = draws(problem, channels, 1, width) < 0.5
    return torch.where(up, ball.high, ball.low).flatten(2)


def squares(problem: Problem, x: Tensor, side: int, count: int) -> Iterator[Tensor]:
    """Yield proposals in Linf: one window at the bounds of its pixels, with a random sign per channel."""
    images, sides = x.view_as(problem.ball.center), torch.full((len(x), 1), side, device=x.device)
    for draw in torch.split(draws(problem, count, 2 + x.shape[1]), 1, 1):
        yield windows(problem, images, draw, sides).view_as(x)


def windows(problem: Problem, x: Tensor, draw: Tensor, side: Tensor) -> Tensor:
    """Return proposals (B, Q, C, H, W) in Linf, for Q windows per example of sides (B, Q)."""
    ball = problem.ball
    height, width = x.shape[2:]

    def span(place: Tensor, size: int) -> Tensor:
        first = (place * (size - side + 1)).long()[..., None]
        pixels = torch.arange(size, device=x.device)
        return (pixels >= first) & (pixels < first + side[..., None])

    inside = span(draw[..., 0], height)[..., None] & span(draw[..., 1], width)[..., None, :]
    bound = torch.where((draw[..., 2:] < 0.5)[..., None, None], ball.high[:, None], ball.low[:, None])
    return torch.where(inside[:, :, None], bound, x[:, None])


def tiles(problem: Problem) -> Tensor:
    """Return the start in L2: a grid of bumps, five on the shorter side, with random signs per tile and channel."""
    ball = problem.ball
    batch, channels, height, width = ball.center.shape
    side = max(min(height, width) // 5, 1)
    down, across = height // side, width // side
    draw = draws(problem, channels + 1, down, across)
    sign = torch.where(draw[:, :-1] < 0.5, 1.0, -1.0).to(ball.center)[..., None, None]
    shape = bumps_of(side, ball.center).view(2, side, side)[(draw[:, -1:] < 0.5).long()]
    delta = (sign * shape).transpose(3, 4).reshape(batch, channels, down * side, across * side)
    top, left = (height - down * side) // 2, (width - across * side) // 2
    delta = pad(delta, (left, width - across * side - left, top, height - down * side - top))
    return ball.project(ball.center + delta * (ball.radius / math.sqrt(channels * down * across))).flatten(2)


def bumps(problem: Problem, x: Tensor, side: int, count: int) -> Iterator[Tensor]:
    """Yield proposals in L2: one window is set to the image, and a bump in another one fills the ball."""
    ball = problem.ball
    channels, height, width = ball.center.shape[1:]
    center, radius = ball.center.flatten(2), ball.radius.flatten(2)
    draw = draws(problem, count, 5 + channels)
    filled, emptied = (places_of(draw[..., at : at + 2], side, height, width) for at in (0, 2))
    shapes, lying = bumps_of(side, x)[:, None], (draw[..., 4] < 0.5).long()
    signs = torch.where(draw[..., 5:, None] < 0.5, 1.0, -1.0).to(x)
    window = window_of(side, width, x.device).expand(len(x), channels, -1)
    for first, second, turn, sign in zip(*(part.unbind(1) for part in (filled, emptied, lying, signs)), strict=True):
        to, of = first + window, second + window
        delta = x - center
        unused = (radius.square() - delta.square().sum((1, 2), keepdim=True)).clamp_min(0)
        old = delta.gather(2, to)
        freed = _energy(old) + _energy(delta.scatter_(2, to, 0).gather(2, of))
        new = sign * shapes[turn] + old * _energy(old).clamp_min(TINY).rsqrt()
        new = new * ((freed + unused / channels) / _energy(new).clamp_min(TINY)).sqrt()
        candidate = x.scatter(2, of, center.gather(2, of))
        yield candidate.scatter_(2, to, (center.gather(2, to) + new).clamp(0, 1))


def _energy(window: Tensor) -> Tensor:
    """Return the sum of squares in each channel of a window (B, C, S * S)."""
    return window.square().sum(2, keepdim=True)


def draws(problem: Problem, *shape: int) -> Tensor:
    """Return uniform random numbers (B, *shape), in float32 as in half precision they may round up to one."""
    return problem.noise.uniform(problem.ball.center.new_empty(len(problem), *shape, dtype=torch.float32))


def places_of(draw: Tensor, side: int, height: int, width: int) -> Tensor:
    """Return the flat positions (B, N, 1, 1) of windows' upper left corners from uniform numbers (B, N, 2)."""
    down, across = (draw[..., 0] * (height - side + 1)).long(), (draw[..., 1] * (width - side + 1)).long()
    return (down * width + across)[..., None, None]


def window_of(side: int, width: int, device: torch.device) -> Tensor:
    """Return the flat positions (S * S,) of a window's pixels, relative to its upper left corner."""
    steps = torch.arange(side, device=device)
    return (steps[:, None] * width + steps).flatten()


def bumps_of(side: int, like: Tensor) -> Tensor:
    """Return the paper's eta, upright and transposed (2, S * S): a positive and a negative half, of norm one."""
    half = side // 2
    bump = torch.cat([_cone(half, side), -_cone(side - half, side)])
    bump = bump / bump.square().sum().sqrt()
    return torch.stack([bump.flatten(), bump.T.flatten()]).to(like)


def _cone(height: int, width: int) -> Tensor:
    """Return sum_{j=d+1}^{n+1} 1 / j^2 at distance d (in the maximum norm) from the center."""
    far = max(height, width) // 2
    terms = torch.arange(1, far + 2, dtype=torch.float64) ** -2
    tails = terms.flip(0).cumsum(0).flip(0)
    down = (torch.arange(height) - height // 2).abs()
    across = (torch.arange(width) - width // 2).abs()
    return tails[torch.maximum(down[:, None], across)]
