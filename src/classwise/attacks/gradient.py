"""The base of gradient attacks: targets and restarts. Each attempt attacks the survivors of the previous ones."""

# B batch, K classes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal, final

import torch
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import margin
from classwise.attacks.problem import Problem, per_pixel
from classwise.core.errors import InputError
from classwise.core.numbers import Count

Target = Literal["most-likely", "least-likely", "random", "all"] | int
"""The wrong class to target: by its logit on the natural image, at random, each class in turn, or one class."""

Search = Callable[[Problem], Tensor]
"""One attempt at a batch."""
CAPACITY = {False: 100, True: 1000}
"""Number of examples that keep the device busy; the key is whether it is a GPU.

Attempts that run in parallel attack all examples, even those that one of them breaks early.
"""


@dataclass(frozen=True, kw_only=True)
class GradientAttack(BallAttack):
    """A gradient attack with targets and restarts. Subclasses implement one attempt, ``search``."""

    target: Target | None = None
    """Class to target; None: untargeted. With a class number, images of that class are not attacked."""
    num_targets: Count | None = None
    """With ``target=all``, only the most likely classes, at most this many."""
    restarts: Count = 1
    """Number of attempts per target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_targets is not None and self.target != "all":
            raise InputError(f"num_targets needs target=all, got target={self.target}")
        if isinstance(self.target, int) and self.target < 0:
            raise InputError(f"target must be a class number from 0, got {self.target}")

    @property
    def supports_targets(self) -> bool:
        return True

    @final
    def perturb(self, problem: Problem) -> Tensor:
        """Try every target in every restart, each on the examples that survived the previous attempts."""
        result = problem.ball.center.clone()
        attacked, problem = self.without_target_class(problem)
        if not len(attacked):
            return result
        rows = attacked
        searches: list[Search] = [self.search, *[self.retry] * (self.restarts - 1)]
        targets_in_turn = self.targets_in_turn(problem)
        attempts = [(search, targets) for search in searches for targets in targets_in_turn]
        if len(attempts) == 1:
            result[rows] = self.search(replace(problem, targets=targets_in_turn[0]))
            return result
        highest = torch.full_like(problem.ball.radius.flatten(), -torch.inf)
        number = 0
        while number < len(attempts):
            # A small batch does not fill the device: several attempts run side by side.
            count = max(CAPACITY[result.device.type == "cuda"] // len(rows), 1)
            search, alike = next(groupby(attempts[number : number + count], itemgetter(0)))
            group = [targets for _, targets in alike]
            chosen = [targets[torch.searchsorted(attacked, rows)] for targets in group if targets is not None]
            trial = replace(
                problem.repeated(range(number, number + len(group))), targets=torch.cat(chosen) if chosen else None
            )
            x = search(trial)
            margins = margin(trial.y)(trial.logits(x)).nan_to_num(-torch.inf)
            for found, reached in zip(x.chunk(len(group)), margins.chunk(len(group)), strict=True):
                # A broken example keeps its image; of an unbroken one the image of the highest margin is returned.
                better = (reached > highest) & (highest <= 0)
                highest = torch.where(better, reached, highest)
                result[rows] = torch.where(per_pixel(better, x), found, result[rows])
            number += len(group)
            alive = highest <= 0
            if not bool(alive.any()):
                break
            rows, problem, highest = rows[alive], problem.take(alive), highest[alive]
        return result

    @abstractmethod
    def search(self, problem: Problem) -> Tensor:
        """Make one attempt, towards the targets of the problem if it has targets. The result lies within the ball."""

    @property
    def retry(self) -> Search:
        """Return the attack for all attempts after the first; by default, this attack."""
        return self.search

    @final
    def without_target_class(self, problem: Problem) -> tuple[Tensor, Problem]:
        """Return the examples to attack, all but those of a fixed target class, and their positions."""
        rows = torch.arange(len(problem), device=problem.y.device)
        if not isinstance(self.target, int) or problem.targets is not None:
            return rows, problem
        rows = rows[problem.y != self.target]
        return rows, problem.take(rows)

    @final
    def targets_in_turn(self, problem: Problem) -> list[Tensor | None]:
        """Return the target classes (B,) of every attempt; None stands for an untargeted one."""
        if self.target is None and problem.targets is None:
            return [None]
        if problem.targets_checked:
            return [problem.targets]
        natural = problem.logits(problem.ball.center)
        num_classes = natural.shape[1]
        if problem.targets is not None:
            _check_targets(problem.targets, problem.y, num_classes)
            return [problem.targets]
        if isinstance(self.target, int):
            targets = torch.full_like(problem.y, self.target)
            _check_targets(targets, problem.y, num_classes)
            return [targets]
        others = num_classes - 1
        if self.target == "random":
            # Uniform over the other classes: 1 to K - 1 classes further, modulo K.
            draw = problem.noise.uniform(natural[:, :1].float()).squeeze(1)
            return [(problem.y + 1 + (draw * others).long()) % num_classes]
        if self.num_targets is not None and self.num_targets > others:
            raise InputError(
                f"num_targets must be at most {others}, the number of wrong classes, got {self.num_targets}"
            )
        order = self.target_order(problem, natural)
        if self.target == "most-likely":
            return [order[:, 0]]
        if self.target == "least-likely":
            return [order[:, -1]]
        return list(order[:, : self.num_targets or others].unbind(1))

    def target_order(self, problem: Problem, natural: Tensor) -> Tensor:
        """Return the wrong classes (B, K - 1) from most to least likely, given the logits of the natural images."""
        order = natural.scatter(1, problem.y[:, None], -torch.inf).argsort(dim=1, descending=True, stable=True)
        return order[:, :-1]


def _check_targets(targets: Tensor, y: Tensor, num_classes: int) -> None:
    invalid = (targets < 0) | (targets >= num_classes)
    if bool(invalid.any()):
        raise InputError(f"target {int(targets[invalid][0])} is not a class: expected 0 to {num_classes - 1}")
    if bool((targets == y).any()):
        count = int((targets == y).sum())
        raise InputError(f"a target must differ from the true label, but {count} of {len(y)} images have it as target")
