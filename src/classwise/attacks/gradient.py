"""Attacks that may aim at a class, and try again: every target and every restart goes to what still survives."""

# B batch, K classes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.losses import margin
from classwise.attacks.problem import Problem
from classwise.core.errors import InputError

Target = Literal["most-likely", "least-likely", "random", "all"] | int
"""Which wrong class to aim at: by the model's own order on the clean image, at random, each in turn, or one class."""

Search = Callable[[Problem, Tensor | None], Tensor]
"""One attempt: towards some classes (B,), or away from the labels."""
ROOM = {False: 100, True: 1000}
"""Examples that keep the device busy, by whether it is a GPU. Side by side, what one breaks costs the others too."""


@dataclass(frozen=True, kw_only=True)
class GradientAttack(BallAttack):
    """An attack with targets and restarts. Its author writes one search towards one class, or away from the label."""

    aims: ClassVar[bool] = True

    target: Target | None = None
    """None: away from the label. A number aims at that class; examples of the class itself are left as they are."""
    num_targets: int | None = None
    """With ``target=all``, only so many classes, the likeliest first."""
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 1:
            raise InputError(f"restarts must be at least 1, got {self.restarts}")
        if self.num_targets is not None and self.target != "all":
            raise InputError("num_targets goes with target=all")
        if self.num_targets is not None and self.num_targets < 1:
            raise InputError(f"num_targets must be at least 1, got {self.num_targets}")
        if isinstance(self.target, int) and self.target < 0:
            raise InputError(f"target = {self.target} is not a class")

    @final
    def perturb(self, problem: Problem) -> Tensor:
        """Every target in turn, and that again for every restart, each on what the ones before left."""
        result = problem.ball.centre.clone()
        rows = torch.arange(len(problem), device=result.device)
        if isinstance(self.target, int) and problem.targets is None:
            rows = rows[problem.y != self.target]
            if not len(rows):
                return result
            problem = problem.take(rows)
        places = rows
        searches: list[Search] = [self.search, *[self.retry] * (self.restarts - 1)]
        aims = self._aims(problem)
        attempts = [(search, aim) for search in searches for aim in aims]
        if len(attempts) == 1:
            result[rows] = self.search(problem, aims[0])
            return result
        nearest = torch.full_like(problem.ball.radius.flatten(), -torch.inf)
        number = 0
        while number < len(attempts):
            # A small batch does not fill the device: several attempts go side by side.
            room = max(ROOM[result.device.type == "cuda"] // len(rows), 1)
            search, alike = next(groupby(attempts[number : number + room], itemgetter(0)))
            group = [aim for _, aim in alike]
            aimed = [aim[torch.searchsorted(places, rows)] for aim in group if aim is not None]
            trial = problem.attempts(range(number, number + len(group)))
            x = search(trial, torch.cat(aimed) if aimed else None)
            margins = margin(trial.y)(trial.logits(x)).nan_to_num(-torch.inf)
            for some, reached in zip(x.chunk(len(group)), margins.chunk(len(group)), strict=True):
                # What is broken stays as it is; what no attempt breaks comes back as it was nearest to that.
                nearer = (reached > nearest) & (nearest <= 0)
                nearest = torch.where(nearer, reached, nearest)
                result[rows] = torch.where(nearer.view(-1, *[1] * (x.dim() - 1)), some, result[rows])
            number += len(group)
            alive = nearest <= 0
            if not bool(alive.any()):
                break
            rows, problem, nearest = rows[alive], problem.take(alive), nearest[alive]
        return result

    @abstractmethod
    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        """One attempt: towards the classes ``aim`` (B,), or away from the labels. It ends within the ball."""

    @property
    def retry(self) -> Search:
        """How a further attempt at the same goes: as the first, unless that has a start of its own."""
        return self.search

    def _aims(self, problem: Problem) -> list[Tensor | None]:
        """The classes to aim at, one after the other."""
        if self.target is None and problem.targets is None:
            return [None]
        if problem.drawn:
            return [problem.targets]
        clean = problem.logits(problem.ball.centre)
        num_classes = clean.shape[1]
        if problem.targets is not None:
            _check_targets(problem.targets, problem.y, num_classes)
            return [problem.targets]
        if isinstance(self.target, int):
            targets = torch.full_like(problem.y, self.target)
            _check_targets(targets, problem.y, num_classes)
            return [targets]
        if self.target == "random":
            # uniform over the other classes: a step of 1 to K - 1 round the circle of classes
            draw = problem.noise.uniform(clean[:, :1].float()).squeeze(1)
            return [(problem.y + 1 + (draw * (num_classes - 1)).long()) % num_classes]
        others = num_classes - 1
        if self.num_targets is not None and self.num_targets > others:
            raise InputError(f"num_targets = {self.num_targets}, but there are only {others} classes to aim at")
        order = self.order(problem, clean)
        if self.target == "most-likely":
            return [order[:, 0]]
        if self.target == "least-likely":
            return [order[:, -1]]
        return list(order[:, : self.num_targets or others].unbind(1))

    def order(self, problem: Problem, clean: Tensor) -> Tensor:
        """(B, K - 1) the wrong classes, from the likeliest on the clean image, whose logits these are, to the least."""
        order = clean.scatter(1, problem.y[:, None], -torch.inf).argsort(dim=1, descending=True, stable=True)
        return order[:, :-1]


def _check_targets(targets: Tensor, y: Tensor, num_classes: int) -> None:
    if bool(((targets < 0) | (targets >= num_classes)).any()):
        wrong = int(targets[(targets < 0) | (targets >= num_classes)][0])
        raise InputError(f"target {wrong} is not a class: the model has {num_classes}, counted from 0")
    if bool((targets == y).any()):
        count = int((targets == y).sum())
        raise InputError(f"a target must not be the true label, as it is for {count} of {len(y)} images")
