"""AutoAttack (Croce & Hein, ICML 2020): a parameter-free ensemble of attacks, each run on the remaining survivors.

``standard`` is the ensemble of the authors' code and of RobustBench: APGD on cross-entropy, APGD-T on the targeted DLR
loss, FAB-T and Square Attack. ``plus`` adds the untargeted APGD-DLR and FAB, and gives untargeted attacks five
restarts. ``rand`` is for randomized models: APGD on both losses, each gradient averaged over 20 passes.

Deviations
* With fewer than ten classes APGD-T and FAB-T target all other classes instead of nine. With fewer than four, where DLR
  is not defined, APGD maximizes the margin. The authors' code warns or fails.
* ``attacks`` selects the attacks and their order, and ``version`` sets their restarts and passes. In the authors' code
  a custom list always runs the untargeted attacks with five restarts.
* L1 is not supported. The attacks list their own deviations.
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
from classwise.core.numbers import Count

Version = Literal["standard", "plus", "rand"]

VERSIONS: Mapping[Version, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}
"""The attacks of each version, in order. ``plus`` contains all of them."""
TARGETS = 9
"""Maximum number of target classes of APGD-T and FAB-T."""


@dataclass(frozen=True, kw_only=True)
class AutoAttack(BallAttack):
    """AutoAttack (Croce & Hein 2020): APGD, FAB and Square Attack, each on the survivors of the previous attacks."""

    version: Version = "standard"
    attacks: Names | None = None
    """Attacks to run, in order: apgd-ce, apgd-dlr, apgd-t, fab, fab-t, square. Default: those of the version."""
    steps: Count = 100
    """Steps of APGD and FAB."""
    queries: Count = 5000
    """Queries of Square Attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            if name not in VERSIONS["plus"]:
                raise unknown("attack in AutoAttack", name, VERSIONS["plus"])
        if not self.names or len(set(self.names)) < len(self.names):
            raise InputError(f"attacks must be one or more distinct names, got {'+'.join(self.names) or 'none'}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attacks that run, in order."""
        return VERSIONS[self.version] if self.attacks is None else self.attacks

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """Return the attacks for this number of classes, in order."""
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm}
        with_steps: dict[str, Any] = {**ball, "steps": self.steps}
        restarts = 5 if self.version == "plus" else 1
        eot = 20 if self.version == "rand" else 1
        targeted: dict[str, Any] = {"target": "all", "num_targets": min(TARGETS, num_classes - 1)}
        known = {
            "apgd-ce": APGD(loss="ce", eot=eot, restarts=restarts, **with_steps),
            "apgd-dlr": APGD(loss="dlr", eot=eot, restarts=restarts, **with_steps),
            "apgd-t": APGD(loss="dlr", eot=eot, **targeted, **with_steps),
            "fab": FAB(restarts=restarts, **with_steps),
            "fab-t": FAB(**targeted, **with_steps),
            "square": Square(queries=self.queries, **ball),
        }
        return {name: known[name] for name in self.names}

    def perturb(self, problem: Problem) -> Tensor:
        """Run the attacks on one batch. Examples that are misclassified naturally are not attacked."""
        return in_turn(self.stages, problem)


def in_turn(stages: Callable[[int], Mapping[str, BallAttack]], problem: Problem) -> Tensor:
    """Run the stages for the model's number of classes on one batch, each on the survivors of the previous stages."""
    result = problem.ball.center.clone()
    rows = torch.arange(len(problem), device=result.device)
    natural = problem.logits(result)
    alive = natural.argmax(1) == problem.y
    for attack in stages(natural.shape[1]).values():
        rows, problem = rows[alive], problem.take(alive)
        if not len(rows):
            break
        x = problem.ball.project(attack.perturb(problem))
        result[rows] = x
        alive = problem.survives(x)
    return result
