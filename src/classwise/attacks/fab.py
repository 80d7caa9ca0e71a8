"""The fast adaptive boundary attack, FAB (Croce & Hein, ICML 2020, Algorithm 1): search for the smallest perturbation.

At the current point x every decision boundary f_k = f_y is replaced by its tangent hyperplane. The nearest one is
chosen, and x and the image x_0 are both projected onto it within the box [0, 1], by steps d and d_0. The next point
lies beyond the two projections, closer to that of x:

    x <- clip((1 - a) * (x + eta * d) + a * (x_0 + eta * d_0)),   a = min(||d|| / (||d|| + ||d_0||), alpha_max)

A misclassified point is kept if it is the nearest so far, and moved back: x <- x_0 + beta * (x - x_0). With a target,
as in FAB-T of AutoAttack, only the boundary between the label and the target is considered, so a step takes one
backward pass instead of K - 1; any wrong class still counts.

Called as an attack it searches for a point within the radius. ``closest`` returns the smallest perturbation, whatever
its size.

Deviations
* The nearest boundary is the one nearest within the box, which is exact for linear models. The paper chooses by
  |f_k - f_y| over the dual norm of the gradient, which ignores the box. With more than ten classes the paper's rule
  selects nine candidates, to bound the memory.
* The projection solves the same dual problem in one variable, exactly, by Newton's method instead of sorting: a few
  passes over the pixels. On a GPU it stops after six.
* Called as an attack, an example is finished once a point within the radius is found. A point found further out is
  projected into the ball, where it may still be misclassified; AutoAttack drops it.
* The first attempt at a target starts at the image, restarts start at random at half the radius. The paper takes half
  the smallest distance so far if that is less; in an attack it never is, as only survivors are attacked again.
  ``closest`` does as the paper does.
* The paper ends with three interpolations between the image and the result. Here ``closest`` ends with a short search
  in steps a tenth as long, which also moves along the boundary. Within a radius neither has an effect.
"""

# B batch, D pixels, K classes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from classwise.attacks.gradient import Search
from classwise.attacks.minimum_norm import MinimumNormAttack
from classwise.attacks.problem import WORTH_LEAVING, Problem, per_pixel
from classwise.config.spec import Number
from classwise.core.model_calls import State, Step
from classwise.core.numbers import Count, Share
from classwise.core.threat import Norm, size_in

CANDIDATES = 9
"""Maximum number of boundaries that are projected onto in one step."""
CHECK_EVERY = 10
"""Steps between checks for finished examples, each of which makes the host wait for the device."""
NEWTON_STEPS = 6
"""Fixed number of Newton steps on a GPU, where checking convergence would wait for the device. Two to five suffice."""
FINER = 10
"""Factor by which alpha_max, eta - 1 and 1 - beta are smaller in the final search."""


@dataclass(frozen=True, kw_only=True)
class FAB(MinimumNormAttack):
    """The fast adaptive boundary attack (Croce & Hein 2020): search for the smallest perturbation."""

    steps: Count = 100
    alpha_max: Annotated[Number, Field(ge=0, le=1)] = 0.1
    """Largest weight of the projection of the natural image."""
    eta: Annotated[Number, Field(ge=1)] = 1.05
    """Overshoot: length of a step relative to the distance from the hyperplane."""
    beta: Share = 0.9
    """Share of the perturbation that is kept after a point is misclassified."""
    final_search: Annotated[int, Field(ge=0)] = 20
    """Steps of a finer search from the best point at the end of ``closest``."""

    def search(self, problem: Problem) -> Tensor:
        return self._within_radius(problem, problem.ball.center)

    @property
    def retry(self) -> Search:
        return lambda problem: self._within_radius(problem, _random_start(problem, problem.ball.radius / 2))

    def smallest(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return the nearest images over all targets and restarts, without early stopping, and their distances."""
        center = problem.ball.center
        best, sizes = center.clone(), center.new_full((len(problem),), torch.inf)
        for targets in self.targets_in_turn(problem):
            attempt = replace(problem, targets=targets)
            for restart in range(self.restarts):
                within = torch.minimum(sizes.view_as(problem.ball.radius), problem.ball.radius)
                start = center if restart == 0 else _random_start(problem, within / 2)
                found, size = self._minimize(attempt, start, enough=torch.zeros_like(sizes))
                better = size < sizes
                best, sizes = _where(better, found, best), torch.where(better, size, sizes)
        fooled = sizes.isfinite()
        if self.final_search and bool(fooled.any()):
            best[fooled], sizes[fooled] = self._refine(problem.take(fooled), best[fooled], sizes[fooled])
        return best, sizes

    def _refine(self, problem: Problem, best: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Search from the best points in smaller steps, along the boundary to the class predicted there."""
        finer = replace(
            self,
            steps=self.final_search,
            alpha_max=self.alpha_max / FINER,
            eta=1 + (self.eta - 1) / FINER,
            beta=1 - (1 - self.beta) / FINER,
        )
        problem = replace(problem, targets=problem.logits(best).argmax(1))
        found, size = finer._minimize(problem, best, enough=torch.zeros_like(sizes))
        return _where(size < sizes, found, best), torch.minimum(size, sizes)

    def _within_radius(self, problem: Problem, start: Tensor) -> Tensor:
        found, _ = self._minimize(problem, start, enough=problem.ball.radius.flatten())
        return problem.ball.project(found)

    def _minimize(self, problem: Problem, x: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest misclassified points of a search and their distances, or the last points and infinity.

        An example is finished once its distance is ``enough`` (B,).
        """
        found, sizes = x.clone(), torch.full_like(enough, torch.inf)
        rows = torch.arange(len(problem), device=x.device)
        step, state = self._step(problem, enough), self._record(problem, enough, x, found, sizes)
        for done in range(0, self.steps, CHECK_EVERY):
            found[rows], sizes[rows] = state[1:]
            wanted = sizes[rows] > enough[rows]
            left = int(wanted.sum())
            if not left:
                return found, sizes
            if len(rows) - left >= WORTH_LEAVING * len(rows):
                rows, problem, state = rows[wanted], problem.take(wanted), tuple(part[wanted] for part in state)
                step = self._step(problem, enough[rows])
            state = problem.repeat(step, state, min(CHECK_EVERY, self.steps - done))
        found[rows], sizes[rows] = state[1:]
        return found, sizes

    def _step(self, problem: Problem, enough: Tensor) -> Step:
        """Return the function that takes one step."""

        def step(x: Tensor, found: Tensor, sizes: Tensor) -> State:
            return self._record(problem, enough, self._cross(problem, x), found, sizes)

        return step

    def _record(self, problem: Problem, enough: Tensor, x: Tensor, found: Tensor, sizes: Tensor) -> State:
        """Keep misclassified points that are nearer than before, and move them back towards the image."""
        survives = problem.survives(x)
        size = size_in(problem.ball.norm, x - problem.ball.center)
        better = ~survives & (size < sizes) & (sizes > enough)
        found = _where(better | sizes.isinf(), x, found)
        back = problem.ball.center + self.beta * (x - problem.ball.center)
        return _where(survives, x, back), found, torch.where(better, size, sizes)

    def _cross(self, problem: Problem, x: Tensor) -> Tensor:
        """Return points beyond the nearest boundary, between the projections of the current points and the images."""
        norm = problem.ball.norm
        here, home = x.flatten(1), problem.ball.center.flatten(1)
        normal, value, from_here = _nearest_boundary(problem, x)
        # The value at the image is that of the tangent, not of the model.
        from_home = to_hyperplane(home, normal, value + (normal * (home - here)).sum(1), norm)
        near, far = size_in(norm, from_here), size_in(norm, from_home)
        alpha = (near / (near + far).clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(self.alpha_max)[:, None]
        beyond = (1 - alpha) * (here + self.eta * from_here) + alpha * (home + self.eta * from_home)
        return beyond.clamp(0, 1).view_as(x)


def to_hyperplane(x: Tensor, normal: Tensor, value: Tensor, norm: Norm) -> Tensor:
    """Return the shortest steps d (B, D) from ``x`` (B, D) to a hyperplane, value + normal * d = 0, within [0, 1].

    If the hyperplane (``value`` (B,) at x, gradient ``normal`` (B, D)) does not meet the box, d leads to the point of
    the box nearest to it.

    By the optimality conditions every pixel moves by min(t * pace_i, room_i) in the direction that changes the value
    towards 0, where room_i is its distance to the bound of the box, and pace_i is 1 for Linf and |normal_i| for L2. The
    gain sum_i |normal_i| * min(t * pace_i, room_i) is concave in t, so Newton's method from t = 0 never overshoots:
    each step finds further pixels that reach their bound, and the first step that finds none has the exact t.
    """
    normal = normal * -value.sign()[:, None]
    room = torch.where(normal > 0, 1 - x, x) * (normal != 0)
    # Relative to the largest entry, as the squares of a confident model's gradient may underflow.
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
        if passes == NEWTON_STEPS if x.is_cuda else torch.equal(reached, full):
            return normal.sign() * torch.where(full, room, level[:, None] * pace)
        full = reached


def _nearest_boundary(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest tangent at ``x`` within the box: normal (B, D), value (B,) and the step (B, D) to it."""
    y, targets = problem.y[:, None], problem.targets

    def differences(logits: Tensor) -> Tensor:
        num_classes = logits.shape[1]
        if targets is None:
            others = (y + torch.arange(1, num_classes, device=y.device)) % num_classes
        else:
            others = targets[:, None]
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
    sizes = size_in(norm, steps.flatten(0, 1)).view_as(values)
    missed = (values + (normals * steps).sum(2)).abs() > 1e-3 * values.abs()
    sizes = torch.where(missed | sizes.isnan(), torch.inf, sizes)
    rows, nearest = torch.arange(len(x), device=x.device), sizes.argmin(1)
    return normals[rows, nearest], values[rows, nearest], steps[rows, nearest]


def _random_start(problem: Problem, radius: Tensor) -> Tensor:
    """Return a random point at this distance (B, 1, 1, 1) from the image, clipped to the box."""
    return (problem.ball.center + radius * problem.ball.direction(problem.noise)).clamp(0, 1)


def _where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(per_pixel(condition, x), x, other)
