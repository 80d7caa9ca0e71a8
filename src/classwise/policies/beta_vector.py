"""TRADES with a strength per class (Tian et al. 2021, Eq. 5): CE(f(x), y) + beta_y * KL(p(x) || p(x')).

The paper's case study lowers beta of one class from 6 to 0.5, which helps the class most often confused with it. The
strengths are constant during training.

Deviations
* Works with any objective: its adversarial term is scaled by beta_c / beta.
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
    """Set the strength beta of the adversarial term per class."""

    paper: ClassVar[str] = "Tian et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("beta_scale",)

    beta: Numbers | dict[str, Number] | None = None
    """One number per class, or a table from class names or numbers to values. Default: the objective's beta."""

    def __post_init__(self) -> None:
        if not self.beta:
            raise InputError("beta-vector needs beta: one number per class, or a table like { dog = 0.5 }")
        for value in self.beta.values() if isinstance(self.beta, Mapping) else self.beta:
            if not 0 <= value < math.inf:
                raise InputError(f"beta must be finite and not negative, got {value}")

    def start(self, task: Task) -> ClassControls:
        if task.beta == 0:
            raise InputError("beta-vector needs an objective with beta above 0, as it scales beta")
        assert self.beta is not None
        scale = torch.tensor(by_class("beta", self.beta, task, task.beta), dtype=torch.float64) / task.beta
        return replace(ClassControls.uniform(task.num_classes), beta_scale=scale.float())
