"""The base class of attacks. Its public call handles everything except the algorithm."""

# B batch, K classes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from classwise.attacks.problem import PassCounter, Problem, per_pixel
from classwise.config.spec import convert
from classwise.core.errors import InputError
from classwise.core.model_calls import OptimizedCopy, device_of, dtype_of, frozen, logits_of, run_steps
from classwise.core.streams import draw, noise_of
from classwise.core.threat import Norm, Threat
from classwise.core.types import Attack, AttackCall, Effort


@dataclass(frozen=True, kw_only=True)
class BallAttack(Attack):
    """An attack within a norm ball. Subclasses implement ``perturb``. The repr identifies an attack in reports.

    The public call puts the model into evaluation mode with frozen parameters and restores it, enables gradients
    whatever the mode of the caller, and projects the result into the ball and [0, 1]. Where a result is not finite, the
    natural image is returned.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("Linf", "L2")
    """Supported norms; the first is the default."""
    alternative: ClassVar[str] = "another attack"
    """The attack to suggest for other norms."""

    eps: float | str | None = None
    """Radius, a number or a fraction such as 8/255. Default: that of the evaluation or the recipe."""
    norm: Norm | None = None
    """Norm. Default: that of the evaluation or the recipe, else the first supported one."""

    def __post_init__(self) -> None:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in convert(type(self).__name__, type(self), given).items():
            object.__setattr__(self, name, value)
        self._check_norm(self.norm or self.norms[0])
        if self.eps is not None:
            Threat.parse(self.eps, self.norm or self.norms[0])

    @property
    def threat(self) -> Threat:
        if self.eps is None:
            raise InputError(f"{self.name} has no radius: set eps, for example eps='8/255'")
        return Threat.parse(self.eps, self.norm or self.norms[0])

    def within(self, threat: Threat) -> Self:
        self._check_norm(threat.norm)
        for setting, own, wanted in (("norm", self.norm, threat.norm), ("eps", self.eps, threat.text)):
            if own is not None and str(own) != wanted:
                raise InputError(
                    f"attack {self.name!r} sets {setting} = {own}, but runs with {setting} = {wanted}: set {setting} "
                    "in one place"
                )
        return replace(self, eps=threat.text, norm=threat.norm)

    def _check_norm(self, norm: Norm) -> None:
        if norm not in self.norms:
            raise InputError(f"{self.name} supports {' and '.join(self.norms)} only: for {norm} use {self.alternative}")

    @final
    def run(self, call: AttackCall) -> tuple[Tensor, Effort]:
        with self.searching(call) as problem:
            found = self.perturb(problem).detach() if len(call.x) else problem.ball.center
            finite = per_pixel(found.flatten(1).isfinite().all(1), found)
            result = problem.ball.project(torch.where(finite, found, problem.ball.center))
            return result.to(call.x.device), problem.counter.effort

    @contextmanager
    def searching(self, call: AttackCall) -> Iterator[Problem]:
        """Provide the problem of a call, with the model in evaluation mode and gradients enabled meanwhile."""
        with torch.inference_mode(False), torch.enable_grad(), frozen(call.model):
            yield self.problem(call)

    def problem(self, call: AttackCall) -> Problem:
        """Return the problem of a call, on the device of the model."""
        model, x, y, targets = call.model, call.x, call.y, call.targets
        if len(x) != len(y):
            raise InputError(f"expected one label per image, got {len(y)} labels for {len(x)} images")
        if targets is not None and not self.supports_targets:
            raise InputError(f"{self!r} does not support targets: use a gradient attack with a loss other than 'kl'")
        distributions = targets is not None and targets.dim() == 2 and targets.is_floating_point()
        if targets is not None and (targets[:, 0] if distributions else targets).shape != y.shape:
            raise InputError(f"expected one target per image, got {tuple(targets.shape)} for {len(y)} images")
        device, dtype = device_of(model), dtype_of(model)

        optimized = model if isinstance(model, OptimizedCopy) else None

        def forward(images: Tensor) -> Tensor:
            output = model(images.to(dtype))
            return output if optimized is not None else logits_of(output)

        with torch.inference_mode(False):
            # Clones are normal tensors even if the caller is in inference mode.
            if targets is not None:
                targets = draw(targets.to(device), call.generator) if distributions else targets.clone().to(device)
            return Problem(
                forward=forward,
                ball=self.threat.ball(x.detach().clone().to(device), call.eps_scale),
                y=y.clone().to(device),
                noise=noise_of(call.generator),
                counter=PassCounter(len(x), device),
                rows=torch.arange(len(x), device=device),
                targets=targets,
                targets_checked=distributions,
                repeat_steps=run_steps if optimized is None else optimized.repeat_steps,
                slack=0.0 if optimized is None else optimized.slack,
            )

    @abstractmethod
    def perturb(self, problem: Problem) -> Tensor:
        """Run the algorithm: return images in or near the ball that the model should misclassify."""
