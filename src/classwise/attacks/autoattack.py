"""AutoAttack (Croce & Hein, ICML 2020): an ensemble without settings, each attack on what the ones before left.

``standard`` is the ensemble of the authors' code and of RobustBench: APGD on cross-entropy, APGD-T on the targeted DLR
loss, FAB-T, and Square Attack. ``plus`` adds the untargeted APGD-DLR and FAB, with five restarts of what is untargeted.
``rand`` is for models that answer at random: APGD on both losses, every gradient averaged over 20 passes.

Deviations
* With fewer than ten classes APGD-T and FAB-T aim at all of the others, not at nine; below four classes, where DLR is
  not defined, APGD climbs the margin. The authors' code warns, or fails.
* ``attacks`` picks the attacks and their order, and ``version`` settles the restarts and passes they get. In the
  authors' code an own list always runs the untargeted attacks with five restarts.
* L1 is not covered. The attacks list their own deviations.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from classwise.attacks.apgd import APGD
from classwise.attacks.base import BallAttack
from classwise.attacks.fab import FAB
from classwise.attacks.problem import Problem
from classwise.attacks.square import Square
from classwise.config.spec import Names
from classwise.core.errors import InputError, unknown

Version = Literal["standard", "plus", "rand"]

VERSIONS: Mapping[Version, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}
"""Which attacks run, in this order. ``plus`` names all there are."""
TARGETS = 9


@dataclass(frozen=True, kw_only=True)
class AutoAttack(BallAttack):
    """APGD, FAB and Square Attack in turn."""

    version: Version = "standard"
    attacks: Names | None = None
    """Only these, in this order, out of apgd-ce, apgd-dlr, apgd-t, fab, fab-t and square."""
    steps: int = 100
    """Of APGD and FAB."""
    queries: int = 5000
    """Of Square Attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            if name not in VERSIONS["plus"]:
                raise unknown("attack in AutoAttack", name, VERSIONS["plus"])
        if not self.names or len(set(self.names)) < len(self.names):
            raise InputError(f"attacks must be one or several different names, got {'+'.join(self.names) or 'none'}")
        for name, value in (("steps", self.steps), ("queries", self.queries)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")

    @property
    def names(self) -> tuple[str, ...]:
        """The attacks that run."""
        return VERSIONS[self.version] if self.attacks is None else self.attacks

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """The attacks as this number of classes asks for them, in order."""
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm}
        walk: dict[str, Any] = {**ball, "steps": self.steps}
        restarts = 5 if self.version == "plus" else 1
        eot = 20 if self.version == "rand" else 1
        aimed: dict[str, Any] = {"target": "all", "num_targets": min(TARGETS, num_classes - 1)}
        known = {
            "apgd-ce": APGD(loss="ce", eot=eot, restarts=restarts, **walk),
            "apgd-dlr": APGD(loss="dlr", eot=eot, restarts=restarts, **walk),
            "apgd-t": APGD(loss="dlr", eot=eot, **aimed, **walk),
            "fab": FAB(restarts=restarts, **walk),
            "fab-t": FAB(**aimed, **walk),
            "square": Square(queries=self.queries, **ball),
        }
        return {name: known[name] for name in self.names}

    def perturb(self, problem: Problem) -> Tensor:
        """The attacks in turn on one batch; an example the model gets wrong untouched stays as it is."""
        return in_turn(self.stages, problem)


def in_turn(stages: Callable[[int], Mapping[str, BallAttack]], problem: Problem) -> Tensor:
    """The attacks for so many classes on one batch, each on what the ones before left."""
    result = problem.ball.centre.clone()
    rows = torch.arange(len(problem), device=result.device)
    clean = problem.logits(result)
    alive = clean.argmax(1) == problem.y
    for attack in stages(clean.shape[1]).values():
        rows, problem = rows[alive], problem.take(alive)
        if not len(rows):
            break
        x = problem.ball.project(attack.perturb(problem))
        result[rows] = x
        alive = problem.survives(x)
    return result
