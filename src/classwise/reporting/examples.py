"""Images before and after an attack."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from classwise.reporting.figures import Card, Picture
from classwise.reporting.part import Part


class Answered(Part):
    """The prediction for one image."""

    label: int
    """The predicted class."""
    name: str = Field(alias="class")
    confidence: float
    """Its probability, in percent."""
    of_label: float
    """The probability of the true label, in percent."""

    def __str__(self) -> str:
        return f"{self.name} ({self.confidence:.1f}%)"


class Example(Part):
    """One image before and after an attack."""

    index: int
    """Its index in the data set."""
    label: int
    name: str = Field(alias="class")
    before: Answered
    after: Answered
    margin: float
    """Under attack: the logit of the true label minus the largest other logit."""
    size: float
    """Size of the change in the norm of the threat."""
    natural_png: str
    change_png: str
    adversarial_png: str
    """PNG in base 64."""

    def card(self, attack: str, amplify: float) -> Card:
        """Return the three images with the predictions."""
        image = f"image {self.index}"
        return Card(
            heading=f"{image}: {self.name}",
            pictures=[
                Picture(png=self.natural_png, alt=f"{image}, a {self.name}, natural", caption="natural"),
                Picture(
                    png=self.change_png,
                    alt=f"the change of {image}, magnified {amplify:g} times",
                    caption=f"change × {amplify:g}",
                ),
                Picture(png=self.adversarial_png, alt=f"{image} after {attack}", caption="adversarial"),
            ],
            lines=[f"{self.before} → {self.after}", f"margin {self.margin:.2f}"],
        )


class Broken(Example):
    """An image that an attack of the evaluation broke."""

    attack: str


class BrokenExamples(Part):
    """Some images of the weakest class that attacks broke: the content of ``examples.json``."""

    schema_: Literal["classwise/examples/1"] = Field("classwise/examples/1", alias="schema")
    name: str = Field(alias="class")
    broken: int
    """Number of images of the class that an attack broke."""
    amplify: float
    examples: list[Broken]


def amplification(norm: str, eps: float) -> float:
    """Return the magnification of changes at which a change by eps (Linf) is black or white."""
    return round(0.5 / eps, 2) if norm == "Linf" and eps > 0 else 10.0
