"""Settings and cost of the attacks of a report."""

from __future__ import annotations

from pydantic import Field

from classwise.reporting.part import Part


class ClassEffort(Part):
    """Cost of an attack on one class."""

    label: int
    name: str = Field(alias="class")
    attacked: int
    forwards: int
    backwards: int


class StageInfo(Part):
    """One stage of an attack."""

    name: str
    settings: str
    whom: str = "survivors"
    """Which of the remaining examples it attacks: all (``survivors``), those with the smallest margins (``nearest``), a
    ``sample``, or all if the fallback is triggered (``doubtful``)."""
    attacked: int
    broke: int
    rejected: int
    seconds: float
    forwards: int
    backwards: int


class AuditInfo(Part):
    """Number of examples that the full ensemble broke, in a sample of those that survive the earlier stages."""

    left: int
    """Number of surviving examples."""
    nearest: int
    random: int
    """Number of examples with the smallest margins, and number drawn at random from each class."""
    broke: int
    broke_random: int
    at_most: float | None
    """Upper 95% bound of the share of ``left`` that the ensemble breaks, in percent, from the random part."""
    doubts: list[str] = Field(default_factory=list)
    """Reasons for the fallback: audit results that the stages missed, and codes of findings about gradients. With any,
    the ensemble ran on all surviving examples."""


class AttackInfo(Part):
    """Settings and cost of one attack."""

    spec: str
    settings: str
    attacked: int
    """Number of examples attacked: those that are naturally correct."""
    rejected: int
    """Number of results outside the ball or [0, 1], which do not count."""
    seconds: float
    forwards: int = 0
    backwards: int = 0
    """Forward and backward passes of single images, without the final check of each result."""
    by_class: list[ClassEffort] = Field(default_factory=list)
    stages: list[StageInfo] = Field(default_factory=list)
    """Stages in the order in which they ran; empty for an attack without stages."""
    audit: AuditInfo | None = None
    """None for an attack without an audit."""
    strongest: str | None = None
    """The strongest of its variants; each variant has a result of its own."""
