"""The types of settings that model factories share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=100_000)]
"""A number of classes, channels or layers."""

Probability = Annotated[float, Field(ge=0, lt=1)]
"""The probability of dropping a value."""

Normalization = Literal["cifar10", "cifar100", "imagenet", "mnist"]
"""A data set whose channel means and deviations a model may subtract and divide by."""
