"""How far the numbers can be trusted: findings as sentences with a severity, and the measurements behind them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from classwise.reporting.part import Part

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""From the mildest up."""


class Finding(Part):
    """A remark on how far the numbers can be trusted."""

    severity: Severity
    code: str = "remark"
    """A short name for programs, such as ``zero-gradient``."""
    text: str
    labels: list[int] = Field(default_factory=list)
    """The classes concerned, where it concerns some and not all."""


class ClassProbe(Part):
    """What was seen of one class: at how many of its ``n`` images."""

    label: int
    n: int
    zero_gradient: int
    """The gradient is zero, lost in rounding, or not finite."""
    misled: int
    """There is a gradient, but a small step along it raises the loss by far less than it promises."""
    slack: int
    """Many steps end nearer to the loss they began with than to the highest they passed."""
    survived: int
    """The label outlives many steps on either of two losses within eps."""
    one_step: int
    """It does, but not a single step of the whole radius."""
    shielded: int = 0
    """It outlives a single step of the whole radius, but not many smaller ones."""
    smooth: int = 0
    """It outlives many steps on the cross-entropy, but not as many on the margin of the logits."""
    black_box: int
    """It does, but not a short attack that sees no gradient."""
    unreached: int
    """It outlives many steps even where every image is allowed."""


class StepProbe(Part):
    """The attack after some steps: means over all images."""

    step: int
    log_odds: float | None
    """What the attack climbs: log (1 - p) / p of the label's probability p."""
    margin: float | None
    broken: int
    """Images that carry a wrong label at this very step."""


class RadiusProbe(Part):
    """The attack in a ball of another size."""

    eps: float
    broken: int
    """Images broken within this radius or a smaller one."""


class BlackBoxProbe(Part):
    """A short attack without gradients on what the one with gradients left."""

    queries: int
    tried: int
    broken: int


class AgreementProbe(Part):
    """Two answers to what is one question."""

    n: int
    changed: int
    """Images that got another label."""
    difference: float | None
    """Of an image's logits, relative to their spread: the largest."""


class OutputProbe(Part):
    """What the answers look like, and at how many images."""

    probabilities: int
    """Not negative, and one in sum."""
    one_hot: int
    """So far apart that their softmax is exactly one-hot in float32."""
    median_margin: float | None
    """Of the label's logit over the next."""
    surest: float | None = None
    """The largest probability that any image has of any class."""
    unmoved: int
    """The same to the last bit under noise far below a grey level."""
    not_finite: int
    """NaN or infinite somewhere within eps."""
    not_finite_beyond: int
    """NaN or infinite only beyond eps, at a corner of the box."""


class NormalizationProbe(Part):
    """Whether the images look better to the model in another scale."""

    n: int
    correct: int
    """As they are."""
    tried: int
    """How many scales; none where too few images are wrong for any to be significantly better."""
    best: str | None = None
    """The one that is, if any."""
    undone: bool = False
    """Whether it helps to undo it."""
    best_correct: int | None = None
    p_value: float | None = None
    """Exact McNemar, times the number tried."""


class Probes(Part):
    """Measurements on a few images of each class, which the model classifies correctly."""

    n: int
    by_class: list[ClassProbe]
    """The classes that have images in the sample."""
    steps: list[StepProbe]
    radii: list[RadiusProbe]
    black_box: BlackBoxProbe | None = None
    """None where it was not asked for."""
    rounding: float
    """The difference of logits that rounding may make, relative to their spread."""
    repeated: AgreementProbe
    """The same batch again."""
    company: AgreementProbe
    """The same image beside others."""
    tremor: AgreementProbe
    """Noise far below a grey level."""
    output: OutputProbe
    normalization: NormalizationProbe | None = None
    """None where it was not asked for."""
    forwards: int
    """Passes of single images of the sample through the model, those with a gradient included."""
    backwards: int


class Sanity(Part):
    """What was noticed about the evaluation itself."""

    findings: list[Finding] = Field(default_factory=list)
    probes: Probes | None = None

    def at_least(self, severity: Severity) -> list[Finding]:
        """The findings as grave as this or graver, the gravest first."""
        grave = SEVERITIES[SEVERITIES.index(severity) :]
        found = [finding for finding in self.findings if finding.severity in grave]
        return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
