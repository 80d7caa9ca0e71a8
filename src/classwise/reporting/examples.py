"""Images before and after an attack, as a report and its page show them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from classwise.reporting.figures import Card, Picture
from classwise.reporting.part import Part


class Answered(Part):
    """What the model says of one image."""

    label: int
    """The predicted one."""
    name: str = Field(alias="class")
    confidence: float
    """Its probability, in percent."""
    of_label: float
    """The probability of the true label, in percent."""

    def __str__(self) -> str:
        return f"{self.name} ({self.confidence:.1f}%)"


class Example(Part):
    """One image and what became of it."""

    index: int
    """Its place in the data set."""
    label: int
    name: str = Field(alias="class")
    before: Answered
    after: Answered
    margin: float
    """Under attack: the logit of the label minus the largest other."""
    size: float
    """Of the change, in the norm of the threat."""
    natural_png: str
    change_png: str
    adversarial_png: str
    """PNG in base 64."""

    def card(self, attack: str, amplify: float) -> Card:
        """The three images side by side, and what the model says of them."""
        image = f"image {self.index}"
        return Card(
            heading=f"{image}: {self.name}",
            pictures=[
                Picture(png=self.natural_png, alt=f"{image}, a {self.name}, untouched", caption="untouched"),
                Picture(
                    png=self.change_png,
                    alt=f"the change of {image}, {amplify:g} times as large",
                    caption=f"change × {amplify:g}",
                ),
                Picture(png=self.adversarial_png, alt=f"{image} after {attack}", caption="attacked"),
            ],
            lines=[f"{self.before} → {self.after}", f"margin {self.margin:.2f}"],
        )


class Broken(Example):
    """One that an attack of the evaluation broke."""

    attack: str


class BrokenExamples(Part):
    """Some images of the weakest class that were broken: what ``examples.json`` holds."""

    schema_: Literal["classwise/examples/1"] = Field("classwise/examples/1", alias="schema")
    name: str = Field(alias="class")
    broken: int
    """All images of the class that an attack broke."""
    amplify: float
    examples: list[Broken]


def amplification(norm: str, eps: float) -> float:
    """How many times as large a change is drawn: a pixel that moved by the whole radius (Linf) is black or white."""
    return round(0.5 / eps, 2) if norm == "Linf" and eps > 0 else 10.0
