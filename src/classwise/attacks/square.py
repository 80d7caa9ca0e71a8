"""Square Attack (Andriushchenko et al. 2020): random search that asks the model for nothing but its scores.

Each query changes one small square window of the image, and the change stays where it raises the loss. The window
covers a share p of the image, which is halved on a fixed schedule (Algorithm 1 there).

Linf (Algorithm 2): the search lives on the corners of the ball. It starts from vertical stripes of ±eps; a proposal
sets one window, channel by channel, to one of the two bounds of its pixels.
L2 (Algorithm 3): the search lives on the sphere. It starts from a grid of 5 x 5 bumps; a proposal empties one window
and spends what that frees, with whatever the box has cut off, on a bump in another one.

Deviations
* Windows, signs and the orientation of a bump are drawn for every example by itself; the authors share one place over
  the batch, which makes the result of an example depend on its neighbours.
* A window may lie anywhere. The authors' code never reaches the last row and column.
* The start is one of the ``queries``; theirs comes on top.
* An example is broken once a wrong class is strictly ahead. The authors count a tie, which argmax may not.
* The schedule is stretched to the number of queries, and L2 windows have odd sides of at least 3, both as in the
  authors' code; tiles of the L2 start are a fifth of the shorter side, so that any image of two pixels and more works.
"""

# B batch, C channels, H height, W width, K classes, S side of a window; images are flat in here: (B, C, H · W)

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.problem import WORTH_LEAVING, Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import State, Step

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries of ten thousand after which the share p is halved."""
BLOCK = 64
"""Queries between two looks at which examples are broken: looking makes a GPU wait."""
PATIENCE = 8
"""Of a small batch looks are rarer: there may be a share of the queries behind between two of them, one in so many."""
ROOM = {False: 100, True: 800}
"""Images that keep the device busy, by whether it is a GPU."""
FEW = {False: 4, True: 160}
"""Images of which one more costs next to nothing."""
AT_ONCE = 8
"""The most proposals of an example in one pass: one of them may be taken, and makes the others vain."""
IN_VAIN = 0.4
"""How many of those in one pass may be expected to be taken."""
TINY = 1e-24
"""Keeps the direction of an empty window finite."""


@dataclass(frozen=True, kw_only=True)
class Square(BallAttack):
    """Random search over square windows, which needs the model's scores only."""

    black_box: ClassVar[bool] = True

    queries: int = 5000
    """At most so many per example. What is broken leaves after a block of queries; a small batch with some others."""
    p_init: Number = 0.8
    """Share of the image that the first windows cover."""
    loss: Literal["ce", "margin"] = "margin"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 1:
            raise InputError(f"queries must be at least 1, got {self.queries}")
        if not 0 < self.p_init <= 1:
            raise InputError(f"p_init must be a share of the image, above 0 and at most 1, got {self.p_init}")

    def perturb(self, problem: Problem) -> Tensor:
        begin, propose = (stripes, squares) if problem.ball.norm == "Linf" else (tiles, bumps)
        result = problem.ball.centre.flatten(2)
        rows = torch.arange(len(result), device=result.device)
        shape = problem.ball.centre.shape[1:]
        x, score = begin(problem), self._score(problem.y)
        best = score(problem.logits(x.view(-1, *shape)))
        best = torch.where(best.isnan(), -torch.inf, best)
        if ROOM[x.is_cuda] // len(x) > 1 and problem.ball.norm == "Linf":
            return self._ahead(problem, x.view(-1, *shape), best)
        for side, count in self._blocks(shape, problem.ball.norm):
            alive = (best < torch.inf).nonzero().squeeze(1)
            if len(alive) < len(rows):
                result = result.index_copy(0, rows, x)
                rows, problem, x, best = rows[alive], problem.take(alive), x[alive], best[alive]
                score = self._score(problem.y)
                if not len(rows):
                    break
            # Proposals start from x as it is when they are made: it changes in place between two of them.
            for candidate in propose(problem, x, side, count):
                scores = score(problem.logits(candidate.view(-1, *shape)))
                better = scores > best
                torch.where(better[:, None, None], candidate, x, out=x)
                best = torch.where(better, scores, best)
        return result.index_copy(0, rows, x).view(-1, *shape)

    def _ahead(self, problem: Problem, x: Tensor, best: Tensor) -> Tensor:
        """The same search on a batch that does not fill the device: several proposals of an example at a time.

        Proposals are mostly refused, the more so the later. So the next few are asked together, as if none were taken;
        the first that is better counts, and those after it are asked again, from the image as it then is. The result
        is the same.
        """
        result, rows = problem.ball.centre.clone(), torch.arange(len(x), device=x.device)
        blocks = list(self._blocks(x.shape[1:], "Linf"))
        draw = torch.cat(
            [draws(problem, count, 2 + x.shape[1]) for _, count in blocks] or [x.new_empty(len(x), 0, 5)], 1
        )
        sides = torch.tensor([side for side, count in blocks for _ in range(count)], device=x.device)
        asked = torch.zeros_like(rows)
        at_once, ask, taken = 0, None, best.new_ones(())
        while True:
            alive = (best < torch.inf) & (asked < len(sides))
            least = torch.where(alive, asked, len(sides)).amin()
            left, behind, rate = torch.stack([alive.sum(), least, taken]).tolist()
            if not left:
                return result.index_copy(0, rows, x)
            if len(rows) - left >= WORTH_LEAVING * len(rows):
                result = result.index_copy(0, rows, x)
                rows, problem, draw, ask = rows[alive], problem.take(alive), draw[alive], None
                x, best, asked = (part[alive] for part in (x, best, asked))
            wanted = side_by_side(len(rows), rate, x.is_cuda)
            if ask is None or wanted != at_once:
                at_once, ask = wanted, self._ask(problem, draw, sides, wanted)
            before, ahead = asked, min(max(BLOCK, behind // PATIENCE), len(sides) - behind)
            state = (x, best, asked, torch.zeros_like(asked))
            x, best, asked, hits = problem.repeat(ask, state, math.ceil(ahead / at_once))
            taken = hits.sum() / (asked - before).sum()

    def _ask(self, problem: Problem, draw: Tensor, sides: Tensor, at_once: int) -> Step:
        """The next few proposals of every example, of which the first that is better is taken."""
        score = self._score(problem.y.repeat_interleave(at_once))

        def ask(x: Tensor, best: Tensor, asked: Tensor, hits: Tensor) -> State:
            query = asked[:, None] + torch.arange(at_once, device=x.device)
            known = query.clamp_max(len(sides) - 1)
            numbers = draw.gather(1, known[..., None].expand(-1, -1, draw.shape[2]))
            candidates = windows(problem, x, numbers, sides[known])
            scores = score(problem.logits(candidates.flatten(0, 1))).view_as(known)
            better = (scores > best[:, None]) & (query < len(sides))
            taken, first = better.any(1), better.long().argmax(1, keepdim=True)
            chosen = candidates.take_along_dim(first[..., None, None, None], 1).squeeze(1)
            x = torch.where(taken[:, None, None, None], chosen, x)
            best = torch.where(taken, scores.gather(1, first).squeeze(1), best)
            return x, best, asked + torch.where(taken, first.squeeze(1) + 1, at_once), hits + taken

        return ask

    def _score(self, y: Tensor) -> Loss:
        """What the search climbs. A broken example is at the top, where no proposal can replace it."""

        margin_of, log_odds_of = margin(y), log_odds(y)

        def score(logits: Tensor) -> Tensor:
            margins = margin_of(logits)
            losses = margins if self.loss == "margin" else log_odds_of(logits)
            return losses.masked_fill(margins > 0, torch.inf)

        return score

    def _blocks(self, shape: torch.Size, norm: str) -> Iterator[tuple[int, int]]:
        """Windows' sides, and how many proposals in a row have them."""
        total = self.queries - 1

        def side(query: int) -> int:
            share = self.p_init / 2 ** bisect_left(HALVINGS, query * 10_000 // total)
            size = round(math.sqrt(share * shape[1] * shape[2]))
            size = max(size, 1) if norm == "Linf" else max(size + 1 - size % 2, 3)
            return min(size, shape[1], shape[2])

        for size, group in groupby(range(total), side):
            count = len(list(group))
            yield from ((size, min(BLOCK, count - done)) for done in range(0, count, BLOCK))


def side_by_side(examples: int, rate: float, gpu: bool) -> int:
    """How many proposals of each example to ask together, a power of two, if such a share of them is taken.

    >>> [side_by_side(10, rate, gpu=False) for rate in (0.5, 0.2, 0.05, 0.0)]
    [1, 2, 8, 8]
    """
    most = min(ROOM[gpu] // examples, AT_ONCE)
    wanted = max(IN_VAIN / max(rate, IN_VAIN / AT_ONCE), FEW[gpu] // examples)
    return 1 << max(int(min(wanted, most)), 1).bit_length() - 1


def stripes(problem: Problem) -> Tensor:
    """The start in Linf: every column of every channel at one of its bounds."""
    ball = problem.ball
    channels, _, width = ball.centre.shape[1:]
    up = draws(problem, channels, 1, width) < 0.5
    return torch.where(up, ball.high, ball.low).flatten(2)


def squares(problem: Problem, x: Tensor, side: int, count: int) -> Iterator[Tensor]:
    """Proposals in Linf: a window at one bound, a sign for each channel."""
    ball = problem.ball
    height, width = ball.centre.shape[2:]
    bounds = torch.cat([ball.low.flatten(2), ball.high.flatten(2)], 2)
    draw = draws(problem, count, 2 + x.shape[1])
    corners = places_of(draw[..., :2], side, height, width)
    to_high = (draw[..., 2:, None] < 0.5).long() * (height * width)
    window = window_of(side, width, x.device)
    for corner, shift in zip(corners.unbind(1), to_high.unbind(1), strict=True):
        places = corner + window
        values = bounds.gather(2, places + shift)
        yield x.scatter(2, places.expand_as(values), values)


def windows(problem: Problem, x: Tensor, draw: Tensor, side: Tensor) -> Tensor:
    """The same proposals for Q windows an example, of sides (B, Q) that may differ: (B, Q, C, H, W)."""
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
    """The start in L2: a grid of bumps, five on the shorter side, signs for each tile and channel."""
    ball = problem.ball
    batch, channels, height, width = ball.centre.shape
    side = max(min(height, width) // 5, 1)
    down, across = height // side, width // side
    draw = draws(problem, channels + 1, down, across)
    sign = torch.where(draw[:, :-1] < 0.5, 1.0, -1.0).to(ball.centre)[..., None, None]
    shape = bumps_of(side, ball.centre).view(2, side, side)[(draw[:, -1:] < 0.5).long()]
    delta = (sign * shape).transpose(3, 4).reshape(batch, channels, down * side, across * side)
    top, left = (height - down * side) // 2, (width - across * side) // 2
    delta = pad(delta, (left, width - across * side - left, top, height - down * side - top))
    return ball.project(ball.centre + delta * (ball.radius / math.sqrt(channels * down * across))).flatten(2)


def bumps(problem: Problem, x: Tensor, side: int, count: int) -> Iterator[Tensor]:
    """Proposals in L2: one window is emptied, and a bump is added to another one and fills up the ball."""
    ball = problem.ball
    channels, height, width = ball.centre.shape[1:]
    centre, radius = ball.centre.flatten(2), ball.radius.flatten(2)
    draw = draws(problem, count, 5 + channels)
    filled, emptied = (places_of(draw[..., at : at + 2], side, height, width) for at in (0, 2))
    shapes, lying = bumps_of(side, x)[:, None], (draw[..., 4] < 0.5).long()
    signs = torch.where(draw[..., 5:, None] < 0.5, 1.0, -1.0).to(x)
    window = window_of(side, width, x.device).expand(len(x), channels, -1)
    for first, second, turn, sign in zip(*(part.unbind(1) for part in (filled, emptied, lying, signs)), strict=True):
        to, of = first + window, second + window
        delta = x - centre
        unused = (radius.square() - delta.square().sum((1, 2), keepdim=True)).clamp_min(0)
        old = delta.gather(2, to)
        freed = _energy(old) + _energy(delta.scatter_(2, to, 0).gather(2, of))
        new = sign * shapes[turn] + old * _energy(old).clamp_min(TINY).rsqrt()
        new = new * ((freed + unused / channels) / _energy(new).clamp_min(TINY)).sqrt()
        candidate = x.scatter(2, of, centre.gather(2, of))
        yield candidate.scatter_(2, to, (centre.gather(2, to) + new).clamp(0, 1))


def _energy(window: Tensor) -> Tensor:
    """The sum of squares in each channel of a window (B, C, S · S)."""
    return window.square().sum(2, keepdim=True)


def draws(problem: Problem, *shape: int) -> Tensor:
    """Uniform numbers (B, *shape), in float32 whatever the images: in half precision they round up to one."""
    return problem.noise.uniform(problem.ball.centre.new_empty(len(problem), *shape, dtype=torch.float32))


def places_of(draw: Tensor, side: int, height: int, width: int) -> Tensor:
    """The flat places (B, N, 1, 1) of windows' upper left corners, from two uniform numbers (B, N, 2) for each."""
    down, across = (draw[..., 0] * (height - side + 1)).long(), (draw[..., 1] * (width - side + 1)).long()
    return (down * width + across)[..., None, None]


def window_of(side: int, width: int, device: torch.device) -> Tensor:
    """The flat places (S · S,) of a window's pixels, from its upper left corner."""
    steps = torch.arange(side, device=device)
    return (steps[:, None] * width + steps).flatten()


def bumps_of(side: int, like: Tensor) -> Tensor:
    """The paper's eta: a positive and a negative half, of length one together, upright and lying: (2, S · S)."""
    half = side // 2
    bump = torch.cat([_cone(half, side), -_cone(side - half, side)])
    bump = bump / bump.square().sum().sqrt()
    return torch.stack([bump.flatten(), bump.T.flatten()]).to(like)


def _cone(height: int, width: int) -> Tensor:
    """At distance d (in the maximum norm) from the centre: the sum of 1/j² for j from d + 1 to n + 1."""
    far = max(height, width) // 2
    terms = torch.arange(1, far + 2, dtype=torch.float64) ** -2
    tails = terms.flip(0).cumsum(0).flip(0)
    down = (torch.arange(height) - height // 2).abs()
    across = (torch.arange(width) - width // 2).abs()
    return tails[torch.maximum(down[:, None], across)]
