"""How far an evaluation can be trusted: from measurements and verdicts to sentences with a severity.

A probe may look bad at a single image of an honest model. So every rule allows a small share of such images and
speaks up where more are seen than it explains: by an exact binomial test at ``LEVEL``, over all images together, or in
single classes with the level divided by their number.
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
BEATEN = 0.1
"""Share of all images by which attacks without gradients may be ahead of those with gradients."""
UNSURE = 0.5
"""A probability that a model which tells classes apart exceeds somewhere."""
NAMED = 4
"""Classes that a sentence names."""


def inspect(
    verdicts: Verdicts,
    threat: Threat,
    *,
    rejected: Mapping[str, int],
    classes: Sequence[str] = (),
    searched: Mapping[str, bool] | None = None,
    probes: Probes | None = None,
    trouble: str | None = None,
    fitted: int | None = None,
    trained_on_these: bool = False,
) -> Sanity:
    """Look at a finished evaluation.

    ``rejected`` counts, per attack, results outside the ball or the box. ``searched`` tells, of each column of the
    verdicts that one attack (or one stage) filled, whether it worked without gradients. ``trouble``: why there are no
    probes, where the model failed under them. ``fitted``: the batch size that memory allowed, where that was less.
    """
    findings = []
    if trained_on_these:
        text = "The model was trained on these very images: the numbers say nothing about new ones."
        findings.append(Finding(severity="error", code="trained-on-these", text=text))
    if trouble is not None:
        text = f"The model could not be probed, so nobody knows how far the numbers can be trusted: {trouble}"
        findings.append(Finding(severity="warning", code="not-probed", text=text))
    if probes is not None:
        findings += _of(probes, classes)
    findings += _black_boxes(verdicts, searched or {}, classes)
    findings += _left_alone(verdicts, classes)
    for key, count in rejected.items():
        if count:
            text = f"{key} returned {count} images outside the allowed ball or [0, 1]; they do not count as breaks."
            findings.append(Finding(severity="warning", code="rejected", text=text))
    if fitted is not None:
        text = f"Memory did not hold the batches asked for: the evaluation went on in batches of {fitted}."
        findings.append(Finding(severity="info", code="out-of-memory", text=text))
    if (near := nearby_fraction(threat)) is not None:
        text = f"eps = {threat.text} is not {near}: results for the two are not comparable to the last digit."
        findings.append(Finding(severity="info", code="rounded-eps", text=text))
    if verdicts.attacks and not verdicts.survived().any() and verdicts.survived(NATURAL).any():
        text = "No example survived: the radius may be too large to tell one model or class from another."
        findings.append(Finding(severity="info", code="nothing-survived", text=text))
    return Sanity(findings=findings, probes=probes)


def warnings_of(probes: Probes) -> list[str]:
    """The codes of what the probes warn of, worse included."""
    return [found.code for found in Sanity(findings=_of(probes, ())).at_least("warning")]


def _of(probes: Probes, classes: Sequence[str]) -> list[Finding]:
    return [*_answers(probes), *_gradients(probes, classes), *_scale(probes), *_outputs(probes)]


# Does the model give one answer to one question?


def _answers(probes: Probes) -> Iterator[Finding]:
    yield from _disagreement(
        "random-answers",
        probes.repeated,
        probes.rounding,
        "The model does not answer the same images twice alike",
        "a verdict is one draw, and an attack must average over many (expectation over transformation).",
    )
    if _differ(probes.repeated, probes.rounding):
        return  # no other comparison means anything
    yield from _disagreement(
        "batch-dependent",
        probes.company,
        probes.rounding,
        "The answer to an image depends on the other images of its batch",
        "is batch norm in training mode? Verdicts then change with the batch size.",
    )
    changed, n = probes.tremor.changed, probes.tremor.n
    if _surprise(changed, n, 0.01) < LEVEL:
        text = (
            f"Noise of a sixteenth of a grey level changes the label of {changed} of {n} images: gradients describe "
            "this noise and not the model."
        )
        yield Finding(severity="warning", code="unstable", text=text)


def _disagreement(code: str, probe: AgreementProbe, rounding: float, what: str, so: str) -> Iterator[Finding]:
    if _differ(probe, rounding):
        text = (
            f"{what}: {probe.changed} of {probe.n} labels change, and logits by up to {probe.difference:.2g} of their "
            f"spread: {so}"
        )
        yield Finding(severity="error" if probe.changed else "warning", code=code, text=text)


def _differ(probe: AgreementProbe, rounding: float) -> bool:
    return probe.difference is not None and probe.difference > rounding


# Do its gradients lead anywhere?


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """When a count of ``ClassProbe`` is too large, and what that means."""

    code: str
    count: str
    allowed: float = 0.05
    """The share of images that an honest model may show."""
    severity: Severity = "warning"
    text: str


_WEAK = "gradient attacks are too weak for this model, or it hides its gradients, and its true accuracy may be lower."
_RULES = (
    _Rule(
        code="zero-gradient",
        count="zero_gradient",
        allowed=0.01,
        text="At {share} clean images{where} the gradient is zero or not finite: gradient attacks see nothing there, "
        "and that such images survive is no evidence of robustness.",
    ),
    _Rule(
        code="misleading-gradient",
        count="misled",
        text="At {share} clean images{where} a small step along the gradient raises the loss by less than half of "
        "what the gradient promises: it does not describe the model, and attacks that follow it are misled.",
    ),
    _Rule(
        code="loss-does-not-rise",
        count="slack",
        text="At {share} images{where} {steps} steps of an attack do not raise the loss, or lose what they had gained "
        "(its mean goes from {first} to {last}): the search fails, and more steps would prove nothing.",
    ),
    _Rule(
        code="one-step-wins",
        count="one_step",
        text="A single step breaks {share} images{where} that many had left: the search fails, and that an image "
        "survives it is no evidence of robustness.",
    ),
    _Rule(
        code="single-step-shield",
        count="shielded",
        allowed=0.5,
        text="{share} images{where} withstand a single step of the whole radius and fall to many small ones: the model "
        "seems to have been fitted to single steps (catastrophic overfitting), and what withstands one proves nothing.",
    ),
    _Rule(
        code="smooth-output",
        count="smooth",
        severity="info",
        text="{share} images{where} withstand {longer} steps on the cross-entropy and fall when half of them climb the "
        "margin of the logits: the output is smooth, PGD on the cross-entropy overrates this model, and "
        "temperature-pgd, cw-pgd or fast tell more.",
    ),
    _Rule(
        code="unreached",
        count="unreached",
        text="{share} images{where} keep their label even where every image is allowed (eps = {whole}): an attack that "
        "fails there proves nothing by failing within eps.",
    ),
    _Rule(
        code="black-box-wins",
        count="black_box",
        text="{queries} queries without gradients break {share} images{where} that many steps with gradients had left: "
        + _WEAK,
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
        parts = [(part.label, getattr(part, rule.count), part.n) for part in probes.by_class]
        tally = _Tally(parts, rule.allowed)
        if tally.too_many or (rule.code == "zero-gradient" and tally.count):
            yield Finding(
                severity=rule.severity if tally.too_many else "info",
                code=rule.code,
                text=rule.text.format(**tally.words(classes), **facts),
                labels=tally.labels,
            )


def _black_boxes(verdicts: Verdicts, searched: Mapping[str, bool], classes: Sequence[str]) -> Iterator[Finding]:
    """Whether attacks without gradients broke more of all images than those with gradients.

    Not how many of the others' survivors they broke: where few survive at all, those few fall to anything.
    """
    with_gradients = [key for key, without in searched.items() if not without]
    without_gradients = [key for key, without in searched.items() if without]
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
    tally = _Tally(parts, BEATEN)
    if tally.too_many:
        told = tally.words(classes)
        text = (
            f"Without gradients, {listing(without_gradients)} broke {told['share']} images{told['where']} more than "
            f"{listing(with_gradients)} did: {_WEAK}"
        )
        yield Finding(severity="warning", code="black-box-wins", text=text, labels=tally.labels)


def _left_alone(verdicts: Verdicts, classes: Sequence[str]) -> Iterator[Finding]:
    """Classes that an attack passed over, as one does that aims at the class itself."""
    correct = verdicts.survived(NATURAL)
    for key in verdicts.forwards.keys() & verdicts.attacks.keys():
        asked = verdicts.forwards[key] + verdicts.backwards[key] > 0
        labels = [int(k) for k in np.unique(verdicts.label[correct]) if not asked[verdicts.label == k].any()]
        if labels and asked.any():
            named = listing([_name(label, classes) for label in labels[:NAMED]])
            text = f"{key} did not attack {named}: under it, the class keeps its natural accuracy, which says nothing."
            yield Finding(severity="info", code="left-alone", text=text, labels=labels)


@dataclass(frozen=True, slots=True)
class _Tally:
    """How often something was seen in each class (label, count, out of how many), and the share that is allowed."""

    parts: list[tuple[int, int, int]]
    allowed: float

    @property
    def count(self) -> int:
        """In all classes."""
        return sum(count for _, count, _ in self.parts)

    @property
    def n(self) -> int:
        """Images of all classes."""
        return sum(n for _, _, n in self.parts)

    @property
    def too_many(self) -> bool:
        """Whether it was seen more often than the allowed share explains, over all images or in some class."""
        level = LEVEL / max(sum(n > 0 for _, _, n in self.parts), 1)
        outstanding = any(_surprise(count, n, self.allowed) < level for _, count, n in self.parts)
        return outstanding or _surprise(self.count, self.n, self.allowed) < LEVEL

    @property
    def labels(self) -> list[int]:
        """The classes that show more than the allowed share; none where all do."""
        concerned = [label for label, count, n in self.parts if count > self.allowed * n]
        return [] if len(concerned) == len(self.parts) else concerned

    def words(self, classes: Sequence[str]) -> dict[str, str]:
        """So many of so many, and in which classes, if not in all."""
        concerned = [part for part in self.parts if part[0] in self.labels]
        concerned.sort(key=lambda part: (-part[1] / part[2], part[0]))
        named = [f"{_name(label, classes)} {count} of {n}" for label, count, n in concerned[:NAMED]]
        more = len(concerned) - NAMED
        named += [f"{more} more class{'es' if more > 1 else ''}"] if more > 0 else []
        return {"share": f"{self.count} of {self.n}", "where": f" ({listing(named)})" if named else ""}


def _surprise(count: int, n: int, rate: float) -> float:
    """The probability that so many of n, or more, are seen at this rate.

    >>> round(_surprise(2, 40, 0.01), 4), round(_surprise(3, 40, 0.01), 4)
    (0.0607, 0.0075)
    """
    return float(bdtrc(count - 1, n, rate))


def _name(label: int, classes: Sequence[str]) -> str:
    return class_name(classes[label] if label < len(classes) else str(label))


# Does it see the images as it was trained to, and are its answers logits?


def _scale(probes: Probes) -> Iterator[Finding]:
    found = probes.normalization
    if found is None or found.best is None:
        return
    assert found.p_value is not None
    better = f"the model gets {found.best_correct} instead of {found.correct} of {found.n} images right"
    if found.undone:
        code, text = "double-normalization", f"With {found.best} undone {better}"
        so = "it seems to be applied twice, in the model and before it, or in the model alone."
    else:
        code, text = "missing-normalization", f"In {found.best} {better}"
        so = "it seems to expect that, and a model should do it by itself."
    yield Finding(severity="warning", code=code, text=f"{text} ({p_text(found.p_value)}): {so}")


def _outputs(probes: Probes) -> Iterator[Finding]:
    n, output = probes.n, probes.output
    if output.probabilities == n:
        text = (
            "The outputs look like probabilities (none is negative, their sum is one), and a softmax flattens what "
            "attacks climb: the model should return logits, or the logarithm of the probabilities."
        )
        yield Finding(severity="warning", code="probabilities", text=text)
    elif output.surest is not None and output.surest < UNSURE:
        text = (
            f"On none of {n} images is the model surer of a class than {100 * output.surest:.0f}%, as if its logits "
            "were bare cosines: its cross-entropy mixes all classes, PGD on it overrates the model, and "
            "temperature-pgd with a large 1/T, cw-pgd or fast tell more."
        )
        yield Finding(severity="info", code="unsure", text=text)
    if 2 * output.one_hot > n:
        text = (
            f"At {output.one_hot} of {n} images the logits lie so far apart (a margin of {output.median_margin:.3g} in "
            "the median) that their softmax is exactly one-hot in float32: cross-entropy has no gradient there. The "
            "attacks here climb log-odds, which never go flat, but those of others may report robustness in vain."
        )
        yield Finding(severity="warning", code="saturated", text=text)
    if _surprise(output.unmoved, n, 0.05) < LEVEL:
        text = (
            f"Noise of a sixteenth of a grey level leaves the logits of {output.unmoved} of {n} images the same to the "
            "last bit: the model seems to round its input or to saturate, and a gradient it gives is not its own."
        )
        yield Finding(severity="info", code="unmoved", text=text)
    if output.not_finite:
        text = f"Within eps the model answers with NaN or infinity near {output.not_finite} of {n} images."
        yield Finding(severity="warning", code="not-finite", text=text)
    if output.not_finite_beyond:
        text = (
            f"At {output.not_finite_beyond} of {n} corners of the box (black, white and rounded images) the model "
            "answers with NaN or infinity."
        )
        yield Finding(severity="info", code="not-finite-beyond", text=text)


def nearby_fraction(threat: Threat) -> str | None:
    """The usual n/255 that a decimal radius rounds, if it is not that very number.

    >>> nearby_fraction(Threat.parse("0.031")), nearby_fraction(Threat.parse("8/255"))
    ('8/255', None)
    """
    n = round(threat.eps * 255)
    if threat.norm != "Linf" or "/" in threat.text or not 1 <= n <= 16 or abs(threat.eps - n / 255) >= 5e-4:
        return None
    return None if Fraction(threat.eps) == Fraction(n / 255) else f"{n}/255"
