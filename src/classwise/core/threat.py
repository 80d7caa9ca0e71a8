"""The threat model: a ball of radius eps around each image, intersected with the box [0, 1] of valid images.

``eps`` keeps its text, because 8/255 and 0.031 are different threats and reports show which one was used.
"""

# B batch; images are (B, C, H, W) in [0, 1]

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from classwise.core.choices import Norm as Norm
from classwise.core.errors import InputError, unknown
from classwise.core.fusing import fusible
from classwise.core.numbers import parse_number
from classwise.core.streams import Noise

Start = Literal["uniform", "gaussian", "zero"]

TOLERANCE = 1e-6
"""Rounding allowed in membership checks: adding and subtracting eps in float32 is exact to about 1e-7."""


@dataclass(frozen=True, slots=True)
class Threat:
    """A norm and a radius."""

    norm: Norm
    eps: float
    text: str

    @classmethod
    def parse(cls, eps: float | str, norm: str = "Linf") -> Threat:
        """Parse a radius, given as a number or a fraction.

        >>> Threat.parse("8/255")
        Threat(norm='Linf', eps=0.03137254901960784, text='8/255')
        >>> Threat.parse(0.5, "L2").text
        '0.5'
        """
        text = str(eps).strip()
        try:
            value = float(parse_number(text))  # type: ignore[arg-type]
        except ValueError:
            raise InputError(f"eps = {text!r} is not a number like 0.03 or 8/255") from None
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"eps must be a positive number, got {text}")
        if norm not in get_args(Norm):
            raise unknown("norm", norm, get_args(Norm))
        if norm == "Linf" and value > 1:
            raise InputError(f"eps = {text} is larger than the whole range [0, 1] of a pixel; did you mean {text}/255?")
        return cls(norm, value, text)  # type: ignore[arg-type]

    def ball(self, x: Tensor, scale: Tensor | None = None) -> Ball:
        """Return the ball around each image of a batch; ``scale`` (B,) multiplies the radii."""
        stretch = x.new_ones(x.shape[0]) if scale is None else scale.to(x)
        stretch = stretch.view(-1, *[1] * (x.dim() - 1))
        radius = self.eps * stretch
        return Ball(
            center=x,
            radius=radius,
            stretch=stretch,
            low=(x - radius).clamp_min(0),
            high=(x + radius).clamp_max(1),
            norm=self.norm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ball:
    """The feasible set of each example of a batch."""

    center: Tensor
    radius: Tensor
    """(B, 1, 1, 1)."""
    stretch: Tensor
    """(B, 1, 1, 1) radius relative to eps. Step sizes scale with it, so that the search is the same in every ball."""
    low: Tensor
    high: Tensor
    """(B, C, H, W) bounds of every pixel: [0, 1] intersected with the bounding box of the ball."""
    norm: Norm

    def take(self, rows: Tensor) -> Ball:
        """Return the balls of some examples."""
        names = ("center", "radius", "stretch", "low", "high")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest feasible point (Linf) or a feasible point (L2).

        For L2 the point is scaled onto the ball and then clipped to the box. The center lies in the box, so
        clipping moves every coordinate towards the center's side and never leaves the ball.
        """
        if self.norm == "L2":
            delta = x - self.center
            x = self.center + delta * (self.radius / length(delta).clamp_min(1e-12)).clamp_max(1)
        return x.clamp(self.low, self.high)

    def step(self, x: Tensor, gradient: Tensor, size: float | Tensor) -> Tensor:
        """Take one step of steepest ascent in this norm and project it. Zero gradients change nothing."""
        if self.norm == "Linf":
            return _sign_step(x, gradient, size, self.stretch, self.low, self.high)
        return self.project(torch.addcmul(x, size * self.stretch, unit(gradient)))

    def start(self, how: Start, noise: Noise) -> Tensor:
        """Return a starting point: uniform in the ball, the center plus Gaussian noise (std 0.001), or the center."""
        if how == "zero":
            return self.center.clone()
        if how == "gaussian":
            return self.project(self.center + 0.001 * noise.normal(self.center))
        if self.norm == "Linf":
            return self.project(self.center + self.radius * (2 * noise.uniform(self.center) - 1))
        # Uniform in an L2 ball of dimension d: a uniform direction, and a radius whose d-th power is uniform.
        direction = noise.normal(self.center)
        share = noise.uniform(self.radius) ** (1 / self.center[0].numel())
        return self.project(self.center + self.radius * share * unit(direction))

    def direction(self, noise: Noise) -> Tensor:
        """Return a random direction of norm 1: uniform on the sphere (L2) or on the faces of the cube (Linf)."""
        if self.norm == "L2":
            return unit(noise.normal(self.center))
        draw = 2 * noise.uniform(self.center) - 1
        return draw / size_in("Linf", draw).view_as(self.radius).clamp_min(torch.finfo(draw.dtype).tiny)

    def contains(self, x: Tensor) -> Tensor:
        """Return whether points (B,) are finite, within the radius and within [0, 1], up to rounding."""
        delta = (x - self.center).flatten(1).double()
        if self.norm == "Linf":
            size, allowed = delta.abs().amax(1), TOLERANCE
        else:
            # Rounding errors of the coordinates add up to a length proportional to the root of their number.
            size, allowed = delta.norm(dim=1), max(TOLERANCE, TOLERANCE / 10 * math.sqrt(delta.shape[1]))
        inside = size <= self.radius.flatten().double() + allowed
        flat = x.flatten(1)
        boxed = (flat.amin(1) >= -TOLERANCE) & (flat.amax(1) <= 1 + TOLERANCE)
        return inside & boxed & flat.isfinite().all(1)


@fusible
def _sign_step(x: Tensor, gradient: Tensor, size: float | Tensor, stretch: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.addcmul(x, size * stretch, gradient.sign()).clamp(low, high)


def length(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each example, with shape (B, 1, 1, 1)."""
    # On a CPU, torch's norm sums sequentially and loses four digits on large images; its sum does not.
    return x.flatten(1).square().sum(1).sqrt().view(-1, *[1] * (x.dim() - 1))


def size_in(norm: Norm, delta: Tensor) -> Tensor:
    """Return the norm (B,) of each perturbation."""
    return delta.flatten(1).abs().amax(1) if norm == "Linf" else length(delta).flatten()


def unit(x: Tensor) -> Tensor:
    """Scale each example to norm 1; zero stays zero."""
    # Gradients of confident models can be so small that their squares underflow: divide by the largest entry first.
    largest = x.flatten(1).abs().amax(1).view(-1, *[1] * (x.dim() - 1))
    scaled = x / largest.clamp_min(torch.finfo(x.dtype).tiny)
    return scaled / length(scaled).clamp_min(1e-12)
