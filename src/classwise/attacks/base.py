"""What every attack shares, so that the author of an attack writes only the algorithm."""

# B batch, K classes

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self, final

import torch
from torch import Tensor, nn

from classwise.errors import InputError
from classwise.forward import device_of, dtype_of, frozen, logits_of
from classwise.noise import ExampleNoise, Noise, Randomness, SharedNoise
from classwise.spec import convert
from classwise.threat import Ball, Norm, Threat

Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to logits (B, K)."""


@dataclass(frozen=True, kw_only=True)
class BallAttack(ABC):
    """An attack within a ball. Its repr is its identity in reports.

    The call owns everything that is not the algorithm: the model is put in evaluation mode with its parameters
    frozen and given back exactly as it was, gradients are enabled whatever the caller's mode, and the result is
    projected into the ball and the box; an example that went astray (NaN) falls back to the clean image.
    """

    eps: float | str | None = None
    """Radius, a number or a fraction like 8/255. May be left to the evaluation or the recipe."""
    norm: Norm | None = None
    """Likewise; Linf where nobody says otherwise."""

    def __post_init__(self) -> None:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in convert(type(self).__name__, type(self), given).items():
            object.__setattr__(self, name, value)
        if self.eps is not None:
            Threat.parse(self.eps, self.norm or "Linf")

    @property
    def threat(self) -> Threat:
        """The ball this attack searches."""
        if self.eps is None:
            raise InputError(f"{type(self).__name__} has no radius: give it eps, for example eps='8/255'")
        return Threat.parse(self.eps, self.norm or "Linf")

    def within(self, threat: Threat) -> Self:
        """The same attack, limited to this threat. A norm or radius of its own must be the same."""
        for what, own, wanted in (("norm", self.norm, threat.norm), ("eps", self.eps, threat.text)):
            if own is not None and str(own) != wanted:
                raise InputError(
                    f"{type(self).__name__} asks for {what} = {own}, elsewhere it is {wanted}: give it once"
                )
        return replace(self, eps=threat.text, norm=threat.norm)

    @final
    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
    ) -> Tensor:
        """Adversarial images for ``x`` (B, C, H, W) in [0, 1] with labels ``y`` (B,).

        ``eps_scale`` (B,) stretches the radius of single examples. ``generator`` makes the search reproducible:
        a torch generator, or one stream per example, which makes the result independent of the batching.
        """
        if len(x) != len(y):
            raise InputError(f"{len(x)} images need as many labels, got {len(y)}")
        noise: Noise = generator if isinstance(generator, ExampleNoise) else SharedNoise(generator)
        device, dtype = device_of(model), dtype_of(model)

        def forward(images: Tensor) -> Tensor:
            return logits_of(model(images.to(dtype)))

        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            # The clone is a normal tensor even where the caller works in inference mode.
            ball = self.threat.ball(x.detach().clone().to(device), eps_scale)
            found = self.perturb(forward, ball, y.clone().to(device), noise).detach()
            finite = found.flatten(1).isfinite().all(1).view(-1, *[1] * (x.dim() - 1))
            return ball.project(torch.where(finite, found, ball.centre)).to(x.device)

    @abstractmethod
    def perturb(self, forward: Forward, ball: Ball, y: Tensor, noise: Noise) -> Tensor:
        """The algorithm: images in (or near) the ball that the model should get wrong."""
