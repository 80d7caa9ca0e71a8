"""The fast adaptive boundary attack (Croce & Hein, ICML 2020, Algorithm 1): the smallest perturbation that fools.

At the current point every decision boundary f_k = f_y is replaced by its tangent hyperplane. The nearest one is
chosen; the current point and the image are both projected onto it within the box [0, 1], giving steps d and d_0; and
the next point lies beyond the two projections, a little towards that of the image so that the search does not stray:

    x ← clip((1 - α) (x + η d) + α (x_0 + η d_0)),   α = min(‖d‖ / (‖d‖ + ‖d_0‖), α_max)

Where it has crossed into another class, it is remembered if it is the nearest yet and goes back: x ← x_0 + β (x - x_0).
With a target, as FAB-T in AutoAttack, only the boundary between the label and the target is looked at, so a step costs
one backward pass and not K - 1; any wrong class still counts.

Called as an attack it looks for a point within the radius. ``closest`` is what the method is for: the smallest
perturbation, whatever its size.

Deviations
* The nearest boundary is the one nearest within the box. The paper chooses by |f_k - f_y| over the dual norm of the
  gradient, which ignores the box; this way the answer for a linear model is the true one. Among more than ten
  classes the paper's rule says which nine are compared, to bound the memory.
* The projection solves the same dual problem in one variable, exactly, by Newton's method and not by a sort: a
  handful of passes over the pixels, however many there are. On a GPU it is cut off after six.
* As an attack it leaves an example alone once a point within the radius is found.
  A point found further out is projected into the ball, where it may still fool the model; AutoAttack drops it.
* The first attempt at a target starts at the image, further restarts at random at half the radius. The paper takes
  half the smallest distance so far if that is less; in an attack it never is, as only survivors are tried again.
  ``closest`` does as the paper does.
* The paper ends with three interpolations between the image and the result. Here the end of ``closest`` is a short
  walk in strides a tenth as long, which also slides along the boundary; within a radius neither gains anything.
"""

# B batch, D pixels, K classes

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from classwise.attacks.gradient import GradientAttack, Search
from classwise.attacks.problem import WORTH_LEAVING, Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import State, Step, frozen
from classwise.core.streams import Randomness
from classwise.core.threat import Norm, length, unit

CANDIDATES = 9
"""The most boundaries that are projected onto in one step."""
PAUSE = 10
"""Steps between two looks at which examples are done: each look makes the host wait for the device."""
PASSES = 6
"""Of Newton's method on a GPU, which is not asked whether it is done. It takes two to five."""
FINER = 10
"""How much smaller alpha_max, eta - 1 and 1 - beta are in the final search."""


@dataclass(frozen=True, kw_only=True)
class FAB(GradientAttack):
    """Walks along the nearest decision boundary to where it is closest to the image."""

    steps: int = 100
    alpha_max: Number = 0.1
    """Largest pull towards the projection of the original image."""
    eta: Number = 1.05
    """How far beyond the hyperplane a step goes, relative to the distance from it."""
    beta: Number = 0.9
    """Share of its perturbation that a point keeps once it has crossed into another class."""
    final_search: int = 20
    """Steps of a finer walk from the best point at the end of ``closest``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if not 0 <= self.alpha_max <= 1:
            raise InputError(f"alpha_max must lie between 0 and 1, got {self.alpha_max}")
        if self.eta < 1:
            raise InputError(f"eta must be at least 1, got {self.eta}")
        if not 0 < self.beta < 1:
            raise InputError(f"beta must lie between 0 and 1, got {self.beta}")
        if self.final_search < 0:
            raise InputError(f"final_search must not be negative, got {self.final_search}")

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        return self._within_radius(problem, aim, problem.ball.centre)

    @property
    def retry(self) -> Search:
        return self._search_elsewhere

    def _search_elsewhere(self, problem: Problem, aim: Tensor | None) -> Tensor:
        return self._within_radius(problem, aim, _random_start(problem, problem.ball.radius / 2))

    def closest(self, model: nn.Module, x: Tensor, y: Tensor, *, generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """The nearest misclassified images found and their distances (B,), whatever eps is.

        An image already misclassified is its own answer, at distance 0; where nothing is found, the image comes
        back with distance infinity, as do the images of a class that is itself the target.
        """
        norm = self.norm or "Linf"
        whole = 1.0 if norm == "Linf" else math.sqrt(max(1, x[:1].numel()))
        problem = replace(self, eps=whole).pose(model, x, y, generator=generator)
        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            images = problem.ball.centre.clone()
            distances = images.new_full((len(images),), torch.inf)
            rows = torch.arange(len(images), device=images.device)
            if isinstance(self.target, int):
                rows = rows[problem.y != self.target]
            if len(rows):
                images[rows], distances[rows] = self._smallest(problem.take(rows))
            return images.to(x.device), distances.to(x.device)

    def _smallest(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The smallest of every target and every restart, each followed to its end."""
        centre = problem.ball.centre
        best, sizes = centre.clone(), centre.new_full((len(problem),), torch.inf)
        for aim in self._aims(problem):
            for restart in range(self.restarts):
                within = torch.minimum(sizes.view_as(problem.ball.radius), problem.ball.radius)
                start = centre if restart == 0 else _random_start(problem, within / 2)
                found, size = self._minimise(problem, aim, start, enough=torch.zeros_like(sizes))
                better = size < sizes
                best, sizes = _where(better, found, best), torch.where(better, size, sizes)
        fooled = sizes.isfinite()
        if self.final_search and bool(fooled.any()):
            best[fooled], sizes[fooled] = self._refine(problem.take(fooled), best[fooled], sizes[fooled])
        return best, sizes

    def _refine(self, problem: Problem, best: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """A walk from the best points in smaller strides, along the boundary to the class they are taken for."""
        finer = replace(
            self,
            steps=self.final_search,
            alpha_max=self.alpha_max / FINER,
            eta=1 + (self.eta - 1) / FINER,
            beta=1 - (1 - self.beta) / FINER,
        )
        aim = problem.logits(best).argmax(1)
        found, size = finer._minimise(problem, aim, best, enough=torch.zeros_like(sizes))
        return _where(size < sizes, found, best), torch.minimum(size, sizes)

    def _within_radius(self, problem: Problem, aim: Tensor | None, start: Tensor) -> Tensor:
        found, _ = self._minimise(problem, aim, start, enough=problem.ball.radius.flatten())
        return problem.ball.project(found)

    def _minimise(self, problem: Problem, aim: Tensor | None, x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest misclassified points on one walk and their distances, or the last points and infinity.

        An example whose distance is ``enough`` (B,) walks no further.
        """
        found, sizes = x.clone(), torch.full_like(enough, torch.inf)
        rows = torch.arange(len(problem), device=x.device)
        walk, state = self._walk(problem, aim, enough), self._look(problem, enough, x, found, sizes)
        for done in range(0, self.steps, PAUSE):
            found[rows], sizes[rows] = state[1:]
            wanted = sizes[rows] > enough[rows]
            left = int(wanted.sum())
            if not left:
                return found, sizes
            if len(rows) - left >= WORTH_LEAVING * len(rows):
                rows, problem, state = rows[wanted], problem.take(wanted), tuple(part[wanted] for part in state)
                aim = None if aim is None else aim[wanted]
                walk = self._walk(problem, aim, enough[rows])
            state = problem.repeat(walk, state, min(PAUSE, self.steps - done))
        found[rows], sizes[rows] = state[1:]
        return found, sizes

    def _walk(self, problem: Problem, aim: Tensor | None, enough: Tensor) -> Step:
        """What one step is."""

        def walk(x: Tensor, found: Tensor, sizes: Tensor) -> State:
            return self._look(problem, enough, self._step(problem, aim, x), found, sizes)

        return walk

    def _look(self, problem: Problem, enough: Tensor, x: Tensor, found: Tensor, sizes: Tensor) -> State:
        """Remember where the model is fooled nearer than before, and go back from there."""
        survives = problem.survives(x)
        size = _size(x - problem.ball.centre, problem.ball.norm)
        better = ~survives & (size < sizes) & (sizes > enough)
        found = _where(better | sizes.isinf(), x, found)
        back = problem.ball.centre + self.beta * (x - problem.ball.centre)
        return _where(survives, x, back), found, torch.where(better, size, sizes)

    def _step(self, problem: Problem, aim: Tensor | None, x: Tensor) -> Tensor:
        """Beyond the nearest boundary, mostly from here and a little from the original."""
        norm = problem.ball.norm
        here, home = x.flatten(1), problem.ball.centre.flatten(1)
        normal, value, from_here = _nearest_boundary(problem, aim, x)
        # The value at home is that of the tangent, not of the model.
        from_home = to_hyperplane(home, normal, value + (normal * (home - here)).sum(1), norm)
        near, far = _size(from_here, norm), _size(from_home, norm)
        alpha = (near / (near + far).clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(self.alpha_max)[:, None]
        beyond = (1 - alpha) * (here + self.eta * from_here) + alpha * (home + self.eta * from_home)
        return beyond.clamp(0, 1).view_as(x)


def to_hyperplane(x: Tensor, normal: Tensor, value: Tensor, norm: Norm) -> Tensor:
    """The shortest steps δ (B, D) from points ``x`` (B, D) with value + normal · δ = 0 that stay in the box [0, 1].

    Where the hyperplane (``value`` (B,) at x, gradient ``normal`` (B, D)) misses the box, δ leads to the point of
    the box that comes nearest to it, the corner of the pixels that matter.

    Every pixel moves the right way by min(λ · pace_i, room_i), room_i being its distance to the edge of the box,
    and pace_i = 1 for Linf or |normal_i| for L2; these are the points that satisfy the optimality conditions. The
    gain Σ |normal_i| · min(λ · pace_i, room_i) is concave in λ, so Newton's method from λ = 0 never overshoots:
    each pass finds further pixels that reach their edge, and the first that finds none has the exact λ.
    """
    normal = normal * -value.sign()[:, None]
    room = torch.where(normal > 0, 1 - x, x) * (normal != 0)
    # Relative to the largest entry: the squares of a confident model's gradient may all be zero.
    largest = normal.abs().amax(1).clamp_min(torch.finfo(x.dtype).tiny)
    weight = normal.abs() / largest[:, None]
    pace = torch.ones_like(weight) if norm == "Linf" else weight
    need, rate, most = value.abs() / largest, weight * pace, weight * room
    full = room <= 0
    passes = 0
    while True:
        passes += 1
        missing = (need - torch.where(full, most, 0).sum(1)).clamp_min(0)
        level = missing / torch.where(full, 0, rate).sum(1).clamp_min(torch.finfo(x.dtype).tiny)
        reached = full | (level[:, None] * pace >= room)
        if passes == PASSES if x.is_cuda else torch.equal(reached, full):
            return normal.sign() * torch.where(full, room, level[:, None] * pace)
        full = reached


def _nearest_boundary(problem: Problem, aim: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normal (B, D) and value (B,) of the tangent at ``x`` that is nearest in the box, and the step (B, D) to it."""
    y = problem.y[:, None]

    def differences(logits: Tensor) -> Tensor:
        num_classes = logits.shape[1]
        others = (y + torch.arange(1, num_classes, device=y.device)) % num_classes if aim is None else aim[:, None]
        return logits.gather(1, others) - logits.gather(1, y)

    gradients, values, _ = problem.gradients(x, differences)
    normals, values = gradients.flatten(2), values.to(x.dtype)
    norm = problem.ball.norm
    if values.shape[1] > CANDIDATES:
        dual = normals.abs().sum(2) if norm == "Linf" else normals.square().sum(2).sqrt()
        nearest = (values.abs() / dual).nan_to_num(torch.inf).topk(CANDIDATES, largest=False).indices
        values = values.gather(1, nearest)
        normals = normals.gather(1, nearest[:, :, None].expand(-1, -1, normals.shape[2]))
    here = x.flatten(1).repeat_interleave(values.shape[1], 0)
    steps = to_hyperplane(here, normals.flatten(0, 1), values.flatten(), norm).view_as(normals)
    sizes = _size(steps.flatten(0, 1), norm).view_as(values)
    missed = (values + (normals * steps).sum(2)).abs() > 1e-3 * values.abs()
    sizes = torch.where(missed | sizes.isnan(), torch.inf, sizes)
    rows, nearest = torch.arange(len(x), device=x.device), sizes.argmin(1)
    return normals[rows, nearest], values[rows, nearest], steps[rows, nearest]


def _random_start(problem: Problem, radius: Tensor) -> Tensor:
    """A random point at this distance (B, 1, 1, 1), or nearer where the box cuts it off."""
    centre = problem.ball.centre
    if problem.ball.norm == "L2":
        direction = unit(problem.noise.normal(centre))
    else:
        direction = 2 * problem.noise.uniform(centre) - 1
        direction = direction / _size(direction, "Linf").view_as(radius).clamp_min(torch.finfo(centre.dtype).tiny)
    return (centre + radius * direction).clamp(0, 1)


def _size(delta: Tensor, norm: Norm) -> Tensor:
    return delta.flatten(1).abs().amax(1) if norm == "Linf" else length(delta).flatten()


def _where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(condition.view(-1, *[1] * (x.dim() - 1)), x, other)
