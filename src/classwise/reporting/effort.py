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
    whom: str = "survivors"
    """Of the examples that the stages before left: all, those nearest to being broken, a sample, or all if in doubt."""
    attacked: int
    broke: int
    rejected: int
    seconds: float
    forwards: int
    backwards: int


class AuditInfo(Part):
    """What the whole ensemble found in a sample of what the stages before had left."""

    left: int
    """Examples to draw from."""
    nearest: int
    random: int
    """How many were taken because they came nearest to being broken, and how many at random, class by class."""
    broke: int
    broke_random: int
    at_most: float | None
    """The share of ``left`` that the ensemble might break, in percent: the upper end of the random part's 95%."""
    doubts: list[str] = Field(default_factory=list)
    """What the audit saw that the stages before should have broken, and the codes of findings that speak against
    gradients: with any, the ensemble ran on everything."""


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
    audit: AuditInfo | None = None
    """Where the attack has one."""
    strongest: str | None = None
    """Which of its variants it kept, where it tried several; each has a result of its own."""
