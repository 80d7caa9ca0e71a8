"""Attacks that may aim at a class, and try again: every target and every restart goes to what still survives."""

# B batch, K classes

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.problem import Problem
from classwise.errors import InputError

Target = Literal["most-likely", "least-likely", "random", "all"] | int
"""Which wrong class to aim at: by the model's own order on the clean image, at random, each in turn, or one class."""


@dataclass(frozen=True, kw_only=True)
class AimedAttack(BallAttack):
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
        """Every target and every restart in turn, each on what the ones before left."""
        result = problem.ball.centre.clone()
        rows = torch.arange(len(problem), device=result.device)
        if isinstance(self.target, int) and problem.targets is None:
            rows = rows[problem.y != self.target]
            if not len(rows):
                return result
            problem = problem.take(rows)
        attempts = [(aim, restart > 0) for aim in self._aims(problem) for restart in range(self.restarts)]
        places = rows
        for number, (aim, again) in enumerate(attempts):
            attempt = self.retry if again else self.search
            x = attempt(problem, None if aim is None else aim[torch.searchsorted(places, rows)])
            result[rows] = x
            if number + 1 == len(attempts):
                break
            alive = problem.survives(x)
            rows, problem = rows[alive], problem.take(alive)
            if not len(rows):
                break
        return result

    @abstractmethod
    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        """One attempt: towards the classes ``aim`` (B,), or away from the labels. It ends within the ball."""

    def retry(self, problem: Problem, aim: Tensor | None) -> Tensor:
        """A further attempt at the same; another search, unless the first has a start of its own."""
        return self.search(problem, aim)

    def _aims(self, problem: Problem) -> list[Tensor | None]:
        """The classes to aim at, one after the other."""
        if self.target is None and problem.targets is None:
            return [None]
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
        order = clean.scatter(1, problem.y[:, None], -torch.inf).argsort(dim=1, descending=True, stable=True)
        if self.target == "most-likely":
            return [order[:, 0]]
        if self.target == "least-likely":
            return [order[:, others - 1]]
        return list(order[:, : self.num_targets or others].unbind(1))


def _check_targets(targets: Tensor, y: Tensor, num_classes: int) -> None:
    if bool(((targets < 0) | (targets >= num_classes)).any()):
        wrong = int(targets[(targets < 0) | (targets >= num_classes)][0])
        raise InputError(f"target {wrong} is not a class: the model has {num_classes}, counted from 0")
    if bool((targets == y).any()):
        count = int((targets == y).sum())
        raise InputError(f"a target must not be the true label, as it is for {count} of {len(y)} images")
