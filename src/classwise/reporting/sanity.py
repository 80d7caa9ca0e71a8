"""Trust checks: findings with a severity, and the measurements behind them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from classwise.reporting.part import Part

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""Severities in increasing order."""


class Finding(Part):
    """The result of a trust check."""

    severity: Severity
    code: str = "remark"
    """A short name for programs, such as ``zero-gradient``."""
    text: str
    labels: list[int] = Field(default_factory=list)
    """The classes concerned; empty if it concerns all."""


class ClassProbe(Part):
    """Trust checks of one class: the number of its ``n`` images for which each holds."""

    label: int
    n: int
    zero_gradient: int
    """The gradient is zero, lost in rounding, or not finite."""
    misled: int
    """A small step along the gradient raises the loss by far less than its linear prediction."""
    slack: int
    """After many steps the loss is closer to its start than to its maximum."""
    survived: int
    """The image survives many steps on each of two losses within eps."""
    one_step: int
    """It survives these, but not a single step of size eps."""
    shielded: int = 0
    """It survives a single step of size eps, but not many smaller ones."""
    smooth: int = 0
    """It survives many steps on the cross-entropy, but not as many on the margin of the logits."""
    black_box: int
    """It survives the gradient steps, but not a short black-box attack."""
    unreached: int
    """It survives many steps even in an unlimited ball."""


class StepProbe(Part):
    """Means over all images after some steps."""

    step: int
    log_odds: float | None
    """The loss of the attack: log (1 - p) / p of the probability p of the true label."""
    margin: float | None
    broken: int
    """Number of images with a wrong prediction at this step."""


class RadiusProbe(Part):
    """The attack at another radius."""

    eps: float
    broken: int
    """Number of images broken within this or a smaller radius."""


class BlackBoxProbe(Part):
    """A short black-box attack on the images that survive the gradient steps."""

    queries: int
    tried: int
    broken: int


class AgreementProbe(Part):
    """Agreement of two predictions that should be equal."""

    n: int
    changed: int
    """Number of images with another predicted label."""
    difference: float | None
    """Largest difference of logits, relative to their spread."""


class OutputProbe(Part):
    """Properties of the outputs, and the number of images that have them."""

    probabilities: int
    """The outputs are not negative and sum to 1."""
    one_hot: int
    """The softmax is exactly one-hot in float32."""
    median_margin: float | None
    """Median margin of the logit of the true label over the next."""
    surest: float | None = None
    """Maximum confidence over all images."""
    unmoved: int
    """The logits are bit-identical under noise far below a gray level."""
    not_finite: int
    """A logit is NaN or infinite within eps."""
    not_finite_beyond: int
    """A logit is NaN or infinite only beyond eps, at a corner of [0, 1]."""


class NormalizationProbe(Part):
    """Whether the model is more accurate on images in another scale."""

    n: int
    correct: int
    """Number of images classified correctly in the given scale."""
    tried: int
    """Number of scales; 0 if too few images are wrong for a significant gain."""
    best: str | None = None
    """A significantly better scale, if any."""
    undone: bool = False
    """Whether undoing that scale helps."""
    best_correct: int | None = None
    p_value: float | None = None
    """Exact McNemar test, times the number of scales."""


class Probes(Part):
    """Trust checks on a few naturally correct images of each class."""

    n: int
    by_class: list[ClassProbe]
    """The classes that have images in the sample."""
    steps: list[StepProbe]
    radii: list[RadiusProbe]
    black_box: BlackBoxProbe | None = None
    """None if not run."""
    rounding: float
    """Largest difference of logits due to rounding, relative to their spread."""
    repeated: AgreementProbe
    """The same batch repeated."""
    company: AgreementProbe
    """The same image in another batch."""
    tremor: AgreementProbe
    """Noise far below a gray level."""
    output: OutputProbe
    normalization: NormalizationProbe | None = None
    """None if not run."""
    forwards: int
    """Forward passes of single images, including those with a gradient."""
    backwards: int


class Sanity(Part):
    """Findings about the evaluation, and the measurements behind them."""

    findings: list[Finding] = Field(default_factory=list)
    probes: Probes | None = None

    def at_least(self, severity: Severity) -> list[Finding]:
        """Return the findings of at least this severity, the most severe first."""
        grave = SEVERITIES[SEVERITIES.index(severity) :]
        found = [finding for finding in self.findings if finding.severity in grave]
        return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
