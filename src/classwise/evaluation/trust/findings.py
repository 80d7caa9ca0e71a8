"""Derive the findings of the trust checks from the probes and the verdicts.

A probe may fail on single images of any model. Each rule tolerates a small fraction of such images and reports a
finding if significantly more occur: by an exact binomial test at ``LEVEL`` over all images together, and in single
classes with the level divided by their number.
"""

# N examples

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.special import bdtrc

from classwise.core.threat import Threat
from classwise.reporting.formatting import class_name, listing, p_text
from classwise.reporting.sanity import AgreementProbe, Finding, Probes, Sanity, Severity
from classwise.storage.verdicts import NATURAL, Verdicts

LEVEL = 0.01
"""Significance level."""
BLACK_BOX_LEAD = 0.1
"""Fraction of all images by which attacks without gradients may lead attacks with gradients."""
LOW_CONFIDENCE = 0.5
"""Maximum confidence below which the outputs are reported as unusual."""
NAMED = 4
"""Maximum number of classes that a finding names."""


def derive_findings(
    verdicts: Verdicts,
    threat: Threat,
    *,
    rejected: Mapping[str, int],
    classes: Sequence[str] = (),
    black_box: Mapping[str, bool] | None = None,
    probes: Probes | None = None,
    probe_failure: str | None = None,
    reduced_batch_size: int | None = None,
    trained_on_images: bool = False,
) -> Sanity:
    """Return the findings of a finished evaluation.

    ``rejected`` counts the results of each attack outside the ball or [0, 1]. ``black_box`` maps the column of each
    attack or stage to whether it works without gradients. ``probe_failure`` is the error of a model that failed under
    the probes, ``reduced_batch_size`` the batch size after running out of memory.
    """
    findings = []
    if trained_on_images:
        text = "The model was trained on these images: the accuracies do not carry over to new images."
        findings.append(Finding(severity="error", code="trained-on-these", text=text))
    if probe_failure is not None:
        text = f"The trust checks are incomplete: {probe_failure}"
        findings.append(Finding(severity="warning", code="not-probed", text=text))
    if probes is not None:
        findings += _from_probes(probes, classes)
    findings += _black_box_leads(verdicts, black_box or {}, classes)
    findings += _not_attacked(verdicts, classes)
    for key, count in rejected.items():
        if count:
            text = f"{key} returned {count} images outside the ball or [0, 1]; they do not count as adversarial."
            findings.append(Finding(severity="warning", code="rejected", text=text))
    if reduced_batch_size is not None:
        text = f"Out of memory: the evaluation continued with batches of {reduced_batch_size}."
        findings.append(Finding(severity="info", code="out-of-memory", text=text))
    if (near := nearby_fraction(threat)) is not None:
        text = f"eps = {threat.text} is not {near}: results for the two are not exactly comparable."
        findings.append(Finding(severity="info", code="rounded-eps", text=text))
    if verdicts.attacks and not verdicts.survived().any() and verdicts.survived(NATURAL).any():
        text = "No example survives: the radius may be too large to compare models or classes."
        findings.append(Finding(severity="info", code="nothing-survived", text=text))
    return Sanity(findings=findings, probes=probes)


def warning_codes(probes: Probes | None) -> list[str]:
    """Return the codes of the warnings and errors that follow from the probes."""
    if probes is None:
        return []
    return [found.code for found in Sanity(findings=_from_probes(probes, ())).at_least("warning")]


def _from_probes(probes: Probes, classes: Sequence[str]) -> list[Finding]:
    return [*_consistency(probes), *_gradients(probes, classes), *_input_scale(probes), *_outputs(probes)]


# Consistency of the outputs


def _consistency(probes: Probes) -> Iterator[Finding]:
    yield from _inconsistent(
        "random-answers",
        probes.repeated,
        probes.rounding,
        "The outputs for the same images differ between forward passes",
        "Each verdict is one random draw, and attacks must average gradients over several (expectation over "
        "transformation).",
    )
    if _differs(probes.repeated, probes.rounding):
        return  # the other comparisons need a deterministic model
    yield from _inconsistent(
        "batch-dependent",
        probes.company,
        probes.rounding,
        "The outputs for an image depend on the other images of its batch",
        "Verdicts change with the batch size; batch normalization may be in training mode.",
    )
    changed, n = probes.tremor.changed, probes.tremor.n
    if _tail(changed, n, 0.01) < LEVEL:
        text = (
            f"Noise of 1/16 of a gray level changes the label of {changed} of {n} images: gradients reflect such noise "
            "instead of the model."
        )
        yield Finding(severity="warning", code="unstable", text=text)


def _inconsistent(code: str, probe: AgreementProbe, rounding: float, what: str, consequence: str) -> Iterator[Finding]:
    if _differs(probe, rounding):
        text = (
            f"{what}: {probe.changed} of {probe.n} labels change, and logits by up to {probe.difference:.2g} of their "
            f"spread. {consequence}"
        )
        yield Finding(severity="error" if probe.changed else "warning", code=code, text=text)


def _differs(probe: AgreementProbe, rounding: float) -> bool:
    return probe.difference is not None and probe.difference > rounding


# Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A limit on a count of ``ClassProbe``, and the finding if it is exceeded."""

    code: str
    count: str
    allowed: float = 0.05
    """Fraction of the images of a model without masked gradients that may be counted."""
    severity: Severity = "warning"
    text: str


_WEAK = (
    "gradient attacks are too weak for this model, or its gradients are masked. Its robust accuracy may be lower than "
    "reported."
)
_RULES = (
    _Rule(
        code="zero-gradient",
        count="zero_gradient",
        allowed=0.01,
        text="On {share} natural images{where} the gradient is zero or not finite: gradient attacks fail there, and "
        "their failure is no evidence of robustness.",
    ),
    _Rule(
        code="misleading-gradient",
        count="misled",
        text="On {share} natural images{where} a small step along the gradient raises the loss by less than half of "
        "the first-order prediction: the gradient does not describe the loss and misleads attacks.",
    ),
    _Rule(
        code="loss-does-not-rise",
        count="slack",
        text="On {share} images{where} the loss does not rise over {steps} attack steps, or falls again (mean: {first} "
        "to {last}): the search fails, and surviving more steps is no evidence of robustness.",
    ),
    _Rule(
        code="one-step-wins",
        count="one_step",
        text="A single step breaks {share} images{where} that many small steps do not: the search fails, and surviving "
        "it is no evidence of robustness.",
    ),
    _Rule(
        code="single-step-shield",
        count="shielded",
        allowed=0.5,
        text="{share} images{where} survive a single step of the full radius but not many small steps: the model seems "
        "to be overfitted to single steps (catastrophic overfitting), and surviving one is no evidence of robustness.",
    ),
    _Rule(
        code="smooth-output",
        count="smooth",
        severity="info",
        text="{share} images{where} survive {longer} steps on the cross-entropy but not {longer} steps of which half "
        "use the margin loss: the outputs are smooth, and PGD on the cross-entropy overestimates robustness. Use "
        "temperature-pgd, cw-pgd or fast.",
    ),
    _Rule(
        code="unreached",
        count="unreached",
        text="{share} images{where} survive even in a ball that contains every image (eps = {whole}): surviving "
        "within eps is no evidence of robustness.",
    ),
    _Rule(
        code="black-box-wins",
        count="black_box",
        text="{queries} queries without gradients break {share} images{where} that gradient steps do not: " + _WEAK,
    ),
)


def _gradients(probes: Probes, classes: Sequence[str]) -> Iterator[Finding]:
    first, last = probes.steps[0], probes.steps[-1]
    facts = {
        "steps": last.step,
        "longer": 2 * last.step,
        "first": "NaN" if first.log_odds is None else f"{first.log_odds:.3g}",
        "last": "NaN" if last.log_odds is None else f"{last.log_odds:.3g}",
        "whole": f"{probes.radii[-1].eps:.3g}",
        "queries": probes.black_box.queries if probes.black_box else 0,
    }
    for rule in _RULES:
        counts = _Counts([(part.label, getattr(part, rule.count), part.n) for part in probes.by_class], rule.allowed)
        if counts.too_many or (rule.code == "zero-gradient" and counts.total):
            yield Finding(
                severity=rule.severity if counts.too_many else "info",
                code=rule.code,
                text=rule.text.format(**counts.text(classes), **facts),
                labels=counts.labels,
            )


def _black_box_leads(verdicts: Verdicts, black_box: Mapping[str, bool], classes: Sequence[str]) -> Iterator[Finding]:
    """Whether attacks without gradients broke more of all images than those with gradients.

    Survivors of gradient attacks alone are no basis: if there are few of these, any attack may break them.
    """
    with_gradients = [key for key, without in black_box.items() if not without]
    without_gradients = [key for key, without in black_box.items() if without]
    if not with_gradients or not without_gradients:
        return
    survives_white, survives_black = (
        np.logical_and.reduce([verdicts.survived(key) for key in (NATURAL, *keys)])
        for keys in (with_gradients, without_gradients)
    )
    parts = []
    for label in np.unique(verdicts.label):
        rows = verdicts.survived(NATURAL) & (verdicts.label == label)
        lead = int((survives_white & rows).sum()) - int((survives_black & rows).sum())
        parts.append((int(label), max(lead, 0), int(rows.sum())))
    counts = _Counts(parts, BLACK_BOX_LEAD)
    if counts.too_many:
        found = counts.text(classes)
        text = (
            f"Without gradients, {listing(without_gradients)} broke {found['share']} images{found['where']} more than "
            f"{listing(with_gradients)} did: {_WEAK}"
        )
        yield Finding(severity="warning", code="black-box-wins", text=text, labels=counts.labels)


def _not_attacked(verdicts: Verdicts, classes: Sequence[str]) -> Iterator[Finding]:
    """Classes without an attacked example, such as the target of an attack with one target class."""
    correct = verdicts.survived(NATURAL)
    for key in verdicts.forwards.keys() & verdicts.attacks.keys():
        attacked = verdicts.forwards[key] + verdicts.backwards[key] > 0
        labels = [int(k) for k in np.unique(verdicts.label[correct]) if not attacked[verdicts.label == k].any()]
        if labels and attacked.any():
            named = listing([_name(label, classes) for label in labels[:NAMED]])
            text = f"{key} did not attack {named}: its result there is natural accuracy, not robust accuracy."
            yield Finding(severity="info", code="left-alone", text=text, labels=labels)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of an observation by class (label, count, n), and the allowed fraction."""

    parts: list[tuple[int, int, int]]
    allowed: float

    @property
    def total(self) -> int:
        """Over all classes."""
        return sum(count for _, count, _ in self.parts)

    @property
    def n(self) -> int:
        """Images of all classes."""
        return sum(n for _, _, n in self.parts)

    @property
    def too_many(self) -> bool:
        """Whether the allowed fraction does not explain the counts, over all images or in some class."""
        level = LEVEL / max(sum(n > 0 for _, _, n in self.parts), 1)
        in_some_class = any(_tail(count, n, self.allowed) < level for _, count, n in self.parts)
        return in_some_class or _tail(self.total, self.n, self.allowed) < LEVEL

    @property
    def labels(self) -> list[int]:
        """The classes above the allowed fraction; empty if all are."""
        above = [label for label, count, n in self.parts if count > self.allowed * n]
        return [] if len(above) == len(self.parts) else above

    def text(self, classes: Sequence[str]) -> dict[str, str]:
        """Return the total, and the classes above the allowed fraction unless all are, in words."""
        above = [part for part in self.parts if part[0] in self.labels]
        above.sort(key=lambda part: (-part[1] / part[2], part[0]))
        named = [f"{_name(label, classes)}: {count} of {n}" for label, count, n in above[:NAMED]]
        more = len(above) - NAMED
        named += [f"{more} more class{'es' if more > 1 else ''}"] if more > 0 else []
        return {"share": f"{self.total} of {self.n}", "where": f" ({', '.join(named)})" if named else ""}


def _tail(count: int, n: int, rate: float) -> float:
    """The binomial probability of at least ``count`` of ``n``.

    >>> round(_tail(2, 40, 0.01), 4), round(_tail(3, 40, 0.01), 4)
    (0.0607, 0.0075)
    """
    return float(bdtrc(count - 1, n, rate))


def _name(label: int, classes: Sequence[str]) -> str:
    return class_name(classes[label] if label < len(classes) else str(label))


# Input scale and outputs


def _input_scale(probes: Probes) -> Iterator[Finding]:
    found = probes.normalization
    if found is None or found.best is None:
        return
    assert found.p_value is not None
    better = (
        f"the model classifies {found.best_correct} instead of {found.correct} of {found.n} images correctly "
        f"({p_text(found.p_value)})"
    )
    if found.undone:
        code, scale = "double-normalization", f"With {found.best} undone"
        cause = "it seems to be applied twice, or in the model although the model was trained without it."
    else:
        code, scale = "missing-normalization", f"With {found.best}"
        cause = "the model seems to expect it. Make it part of the model."
    yield Finding(severity="warning", code=code, text=f"{scale} {better}: {cause}")


def _outputs(probes: Probes) -> Iterator[Finding]:
    n, output = probes.n, probes.output
    if output.probabilities == n:
        text = (
            "The outputs look like probabilities: none is negative and they sum to one. A softmax flattens the loss "
            "that attacks maximize: return logits or log-probabilities."
        )
        yield Finding(severity="warning", code="probabilities", text=text)
    elif output.surest is not None and output.surest < LOW_CONFIDENCE:
        text = (
            f"Maximum confidence over all {n} images is {100 * output.surest:.0f}%, as if the logits were "
            "cosines. PGD on the cross-entropy then overestimates robustness: use temperature-pgd with a large 1/T, "
            "cw-pgd or fast."
        )
        yield Finding(severity="info", code="unsure", text=text)
    if 2 * output.one_hot > n:
        text = (
            f"The softmax of {output.one_hot} of {n} images is exactly one-hot in float32 (median margin "
            f"{output.median_margin:.3g}): cross-entropy has no gradient there. Attacks of this package maximize "
            "log-odds, which have one, but others may overestimate robustness."
        )
        yield Finding(severity="warning", code="saturated", text=text)
    if _tail(output.unmoved, n, 0.05) < LEVEL:
        text = (
            f"Noise of 1/16 of a gray level leaves the logits of {output.unmoved} of {n} images bit-identical: the "
            "model seems to round its input or to saturate, and its gradient may be an approximation."
        )
        yield Finding(severity="info", code="unmoved", text=text)
    if output.not_finite:
        text = f"Within eps of {output.not_finite} of {n} images the model returns NaN or infinite logits."
        yield Finding(severity="warning", code="not-finite", text=text)
    if output.not_finite_beyond:
        text = (
            f"At {output.not_finite_beyond} of {n} corners of [0, 1] (black, white and rounded images) the model "
            "returns NaN or infinite logits."
        )
        yield Finding(severity="info", code="not-finite-beyond", text=text)


def nearby_fraction(threat: Threat) -> str | None:
    """Return the n/255 that a decimal radius rounds; None if it rounds none or is exact.

    >>> nearby_fraction(Threat.parse("0.031")), nearby_fraction(Threat.parse("8/255"))
    ('8/255', None)
    """
    n = round(threat.eps * 255)
    if threat.norm != "Linf" or "/" in threat.text or not 1 <= n <= 16 or abs(threat.eps - n / 255) >= 5e-4:
        return None
    return None if Fraction(threat.eps) == Fraction(n / 255) else f"{n}/255"
