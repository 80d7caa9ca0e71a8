"""What the attacks of a report were, and what they cost."""

from __future__ import annotations

from pydantic import Field

from classwise.reporting.part import Part


class ClassEffort(Part):
    """What an attack spent on one class."""

    label: int
    name: str = Field(alias="class")
    attacked: int
    forwards: int
    backwards: int


class StageInfo(Part):
    """One stage of an attack as it ran."""

    name: str
    settings: str
    attacked: int
    """Examples that the stages before left."""
    broke: int
    rejected: int
    seconds: float
    forwards: int
    backwards: int


class AttackInfo(Part):
    """An attack as it ran."""

    spec: str
    settings: str
    attacked: int
    """Examples it was run on: those the model classifies correctly when untouched."""
    rejected: int
    """Its results thrown away because they lay outside the ball or the box."""
    seconds: float
    forwards: int = 0
    backwards: int = 0
    """Images through the model and gradients back from it. The final check of each result is not counted."""
    by_class: list[ClassEffort] = Field(default_factory=list)
    stages: list[StageInfo] = Field(default_factory=list)
    """In the order they ran, where the attack has stages."""
    strongest: str | None = None
    """Which of its variants it kept, where it tried several; each has a result of its own."""
