"""The fifteen corruptions of Hendrycks & Dietterich (ICLR 2019), each at five severities.

The constants are those of CIFAR-10-C as published by the authors (``make_cifar_c.py`` in hendrycks/robustness), for
images of 32 pixels. On larger images lengths are multiplied by the shorter side / 32, so that a blur covers the same
share of any image; on smaller images they are unchanged, as fractions of a pixel would have no effect.

A severity is an index into published constants, not a measure. As in CIFAR-10-C, the mean distance to the natural image
does not increase with every severity of glass blur, motion blur and frost, and decreases for the elastic transform.

Deviations
* One set of constants for every image size; Tiny-ImageNet-C has its own, stronger for most corruptions.
* Results are not rounded to 8 bits, except for JPEG, and Gaussian filters mirror the image at the border.
"""

# B batch, C channels

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from classwise.config.spec import Names, Spec, convert, split_list
from classwise.core.errors import InputError, unknown
from classwise.core.streams import Noise, Randomness, noise_of
from classwise.corruptions.blur import BLUR
from classwise.corruptions.digital import DIGITAL
from classwise.corruptions.noise_ import NOISE
from classwise.corruptions.weather import WEATHER

Family = Literal["noise", "blur", "weather", "digital"]
Apply = Callable[[Tensor, int, Noise], Tensor]
"""Maps images in [0, 1], a severity and random numbers to images, which may exceed [0, 1]."""
Severities = Annotated[tuple[int, ...], BeforeValidator(split_list)]
"""One or more severities, joined by ``+`` in a spec."""

FAMILIES: Mapping[Family, Mapping[str, Apply]] = {"noise": NOISE, "blur": BLUR, "weather": WEATHER, "digital": DIGITAL}
CORRUPTIONS: Mapping[str, Apply] = {kind: apply for kinds in FAMILIES.values() for kind, apply in kinds.items()}
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """A corruption of one kind at one severity. Its repr identifies it in reports."""

    kind: str
    severity: int

    def __post_init__(self) -> None:
        for name, value in convert("Corruption", Corruption, {"kind": self.kind, "severity": self.severity}).items():
            object.__setattr__(self, name, value)
        if self.kind not in CORRUPTIONS:
            raise unknown("corruption", self.kind, CORRUPTIONS)
        if self.severity not in SEVERITIES:
            raise InputError(f"severity must be between 1 and 5, got {self.severity}")

    @property
    def family(self) -> Family:
        """Its family: noise, blur, weather or digital."""
        return next(family for family, kinds in FAMILIES.items() if self.kind in kinds)

    @property
    def key(self) -> str:
        """Its name in reports.

        >>> Corruption(kind="fog", severity=3).key
        'fog/3'
        """
        return f"{self.kind}/{self.severity}"

    @torch.no_grad()
    def __call__(self, x: Tensor, *, generator: Randomness = None) -> Tensor:
        """Return corrupted images of the shape, dtype and device of ``x`` (B, C, H, W), gray or RGB in [0, 1].

        Args:
            generator: a torch generator, or one random stream per example, which makes the result of an image
                independent of its batch. None uses the global random state.
        """
        if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < SMALLEST_SIDE or not x.is_floating_point():
            raise InputError(
                "corruptions need float images (B, C, H, W), gray or RGB, with sides of at least "
                f"{SMALLEST_SIDE} pixels, got {tuple(x.shape)} of {x.dtype}"
            )
        if len(x) == 0:
            return x.clone()
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):
            raise InputError(f"corruptions need images in [0, 1], got values from {low:.4g} to {high:.4g}")
        noise = noise_of(generator)
        # Half precision cannot represent the 24 bits of a random number.
        images = (x if x.dtype == torch.float64 else x.float()).contiguous()
        return CORRUPTIONS[self.kind](images, self.severity, noise).clamp(0, 1).to(x.dtype)


def make_corruptions(given: str | Mapping[str, Any] | Spec) -> list[Corruption]:
    """Return the corruptions of a spec: by default all fifteen at every severity, or some kinds, families, severities.

    >>> len(make_corruptions("corruptions"))
    75
    >>> [corruption.key for corruption in make_corruptions("corruptions:kind=fog+snow,severity=3")]
    ['fog/3', 'snow/3']
    >>> [corruption.key for corruption in make_corruptions("corruptions:family=noise,severity=1+5")]
    ['gaussian-noise/1', 'gaussian-noise/5', 'shot-noise/1', 'shot-noise/5', 'impulse-noise/1', 'impulse-noise/5']
    """
    spec = Spec.parse(given)
    if spec.name != "corruptions":
        raise unknown("corruption spec", spec.name, ["corruptions"])
    return _select(**convert("corruptions", _select, spec.options))


def _select(*, kind: Names = (), family: Names = (), severity: Severities = SEVERITIES) -> list[Corruption]:
    if kind and family:
        raise InputError("corruptions: set kind or family, not both")
    for name in family:
        if name not in FAMILIES:
            raise unknown("corruption family", name, FAMILIES)
    of_families = [name for members, kinds in FAMILIES.items() if members in family for name in kinds]
    kinds = kind or of_families or CORRUPTIONS
    # Duplicates count once.
    pairs = dict.fromkeys((name, level) for name in kinds for level in severity or SEVERITIES)
    return [Corruption(kind=name, severity=level) for name, level in pairs]
