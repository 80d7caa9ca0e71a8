"""What every attack shares, so that the author of an attack writes only the algorithm."""

# B batch, K classes

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn

from classwise.attacks.problem import Problem, Tally
from classwise.config.spec import convert
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, frozen, logits_of
from classwise.core.streams import Randomness, draw, noise_of
from classwise.core.threat import Norm, Threat
from classwise.core.types import Effort, Whom


@dataclass(frozen=True, kw_only=True)
class BallAttack(ABC):
    """An attack within a ball. Its repr is its identity in reports.

    The call owns everything that is not the algorithm: the model is put in evaluation mode with its parameters
    frozen and given back exactly as it was, gradients are enabled whatever the caller's mode, and the result is
    projected into the ball and the box; an example that went astray (NaN) falls back to the clean image.
    """

    black_box: ClassVar[bool] = False
    """Whether it works without the model's gradients."""
    uses_optimized_copy: ClassVar[bool] = True
    """Whether it may search an optimized copy of the model."""
    resembles_cascade: ClassVar[bool] = False
    """Whether it searches like the cascade of ``fast``, so that its success is no reason to doubt the cascade."""
    aims: ClassVar[bool] = False
    """Whether it can be given targets."""
    norms: ClassVar[tuple[Norm, ...]] = ("Linf", "L2")
    """The norms it knows; the first where nobody says otherwise."""
    instead: ClassVar[str] = "another attack"
    """What to use under the others."""

    eps: float | str | None = None
    """Radius, a number or a fraction like 8/255. May be left to the evaluation or the recipe."""
    norm: Norm | None = None
    """Likewise; Linf where nobody says otherwise."""

    def __post_init__(self) -> None:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in convert(type(self).__name__, type(self), given).items():
            object.__setattr__(self, name, value)
        self._check_norm(self.norm or self.norms[0])
        if self.eps is not None:
            Threat.parse(self.eps, self.norm or self.norms[0])

    @property
    def threat(self) -> Threat:
        """The ball this attack searches."""
        if self.eps is None:
            raise InputError(f"{type(self).__name__} has no radius: give it eps, for example eps='8/255'")
        return Threat.parse(self.eps, self.norm or self.norms[0])

    def within(self, threat: Threat) -> Self:
        """The same attack, limited to this threat. A norm or radius of its own must be the same."""
        self._check_norm(threat.norm)
        for what, own, wanted in (("norm", self.norm, threat.norm), ("eps", self.eps, threat.text)):
            if own is not None and str(own) != wanted:
                raise InputError(
                    f"{type(self).__name__} asks for {what} = {own}, elsewhere it is {wanted}: give it once"
                )
        return replace(self, eps=threat.text, norm=threat.norm)

    def _check_norm(self, norm: Norm) -> None:
        if norm not in self.norms:
            known = " and ".join(self.norms)
            raise InputError(f"{type(self).__name__} knows only {known}: for {norm} use {self.instead}")

    @final
    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Adversarial images for ``x`` (B, C, H, W) in [0, 1] with labels ``y`` (B,).

        ``eps_scale`` (B,) stretches the radius of single examples. ``generator`` makes the search reproducible:
        a torch generator, or one stream per example, which makes the result independent of the batching.
        ``targets`` are the classes an attack that can aim should aim at (B,), or shares to draw them from (B, K).
        """
        return self.run(model, x, y, eps_scale=eps_scale, generator=generator, targets=targets)[0]

    @final
    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Effort]:
        """The same as a call, with the passes through the model that each example took."""
        problem = self.pose(model, x, y, eps_scale=eps_scale, generator=generator, targets=targets)
        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            found = self.perturb(problem).detach() if len(x) else problem.ball.centre
            finite = found.flatten(1).isfinite().all(1).view(-1, *[1] * (x.dim() - 1))
            result = problem.ball.project(torch.where(finite, found, problem.ball.centre))
            return result.to(x.device), problem.tally.effort

    @final
    def bind(self, model: nn.Module) -> Callable[..., Tensor]:
        """The attack on this model, called as ``attack(x, y)``, as other libraries have it."""
        return partial(self, model)

    def pose(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> Problem:
        """The problem these images pose."""
        if len(x) != len(y):
            raise InputError(f"{len(x)} images need as many labels, got {len(y)}")
        if targets is not None and not self.aims:
            raise InputError(f"{type(self).__name__} cannot aim: it takes no targets")
        shares = targets is not None and targets.dim() == 2 and targets.is_floating_point()
        if targets is not None and (targets[:, 0] if shares else targets).shape != y.shape:
            raise InputError(f"{len(y)} images need as many targets, got {tuple(targets.shape)}")
        device, dtype = device_of(model), dtype_of(model)

        def forward(images: Tensor) -> Tensor:
            return logits_of(model(images.to(dtype)))

        with torch.inference_mode(False):
            # Clones are normal tensors even where the caller works in inference mode.
            if targets is not None:
                targets = draw(targets.to(device), generator) if shares else targets.clone().to(device)
            return Problem(
                forward=forward,
                ball=self.threat.ball(x.detach().clone().to(device), eps_scale),
                y=y.clone().to(device),
                noise=noise_of(generator),
                tally=Tally(len(x), device),
                rows=torch.arange(len(x), device=device),
                targets=targets,
                drawn=shares,
                repeats=getattr(model, "repeat_steps", None),
                slack=getattr(model, "slack", 0.0),
            )

    @abstractmethod
    def perturb(self, problem: Problem) -> Tensor:
        """The algorithm: images in (or near) the ball that the model should get wrong."""

    def variants(self) -> Mapping[str, BallAttack]:
        """The attacks this one tries side by side, to keep whichever is strongest; none if it is a single one."""
        return {}

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """The attacks this one runs in turn, each on what the ones before left; none if it is a single one."""
        return {}

    def whom(self, stage: str) -> Whom:
        """Which of these a stage is for."""
        return "survivors"
