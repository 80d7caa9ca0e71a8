"""TRADES with a strength for each class (Tian et al. 2021, Eq. 5): CE(f(x), y) + beta_y · KL(p(x) ‖ p(x')).

The paper's case study lowers beta of one class from 6 to 0.5, which helps the class that is most often confused with
it. The strengths are fixed for the whole training.

Deviations
* Nothing here is about TRADES: any objective's adversarial term is scaled, by beta_c / beta.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from classwise.config.spec import Number, Numbers
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, Policy, Task
from classwise.policies.by_class import by_class


@dataclass(kw_only=True)
class BetaVector(Policy):
    """Gives each class a strength of the adversarial term of its own."""

    paper: ClassVar[str] = "Tian et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("beta_scale",)

    beta: Numbers | dict[str, Number] | None = None
    """A number for every class, or a table of classes by name or number; the others keep the objective's."""

    def __post_init__(self) -> None:
        if not self.beta:
            raise InputError("beta-vector needs beta: a number for every class, or a table like { dog = 0.5 }")
        for value in self.beta.values() if isinstance(self.beta, Mapping) else self.beta:
            if not 0 <= value < math.inf:
                raise InputError(f"beta must be finite and not negative, got {value}")

    def start(self, task: Task) -> ClassControls:
        if task.beta == 0:
            raise InputError("beta-vector scales the objective's beta, which is 0 here")
        assert self.beta is not None
        scale = torch.tensor(by_class("beta", self.beta, task, task.beta), dtype=torch.float64) / task.beta
        return replace(ClassControls.uniform(task.num_classes), beta_scale=scale.float())
