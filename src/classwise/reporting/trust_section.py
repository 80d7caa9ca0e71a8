"""How far to trust a report, for its page: the findings, and the probes behind them as rows and curves."""

from __future__ import annotations

from classwise.reporting.formatting import class_name
from classwise.reporting.results import ReportData
from classwise.reporting.sanity import AgreementProbe

NAMED = 8
"""Classes that a row names."""


def findings(report: ReportData) -> list[tuple[str, str, str]]:
    """Severity, its word, and the text, the gravest first."""
    words = {"error": "Error", "warning": "Warning", "info": "Note"}
    return [(found.severity, words[found.severity], found.text) for found in report.sanity.at_least("info")]


def rows(report: ReportData) -> list[tuple[str, str]]:
    """What was probed, and what was seen; nothing where there were no probes."""
    probes = report.sanity.probes
    if probes is None:
        return []
    n, steps, output = probes.n, probes.steps[-1].step, probes.output
    told = [
        ("The gradient is zero, lost in rounding or not finite", _images(report, "zero_gradient")),
        ("A small step along the gradient brings far less than promised", _images(report, "misled")),
        (f"{steps} steps do not raise the loss, or lose it again", _images(report, "slack")),
        ("Labels that survive many steps", _images(report, "survived", named=False)),
        ("A single step breaks what many left", _images(report, "one_step")),
        ("A single step leaves what many break", _images(report, "shielded", named=False)),
        ("Steps on the margin break what as many on the cross-entropy left", _images(report, "smooth", named=False)),
        ("The label stays even where every image is allowed", _images(report, "unreached")),
    ]
    if probes.black_box is not None:
        what = f"{probes.black_box.queries} queries without gradients break what many steps left"
        told.append((what, _images(report, "black_box")))
    surest = "" if output.surest is None else f"; at most {100 * output.surest:.0f}% sure"
    margin = "" if output.median_margin is None else f"; median margin {output.median_margin:.3g}"
    told += [
        ("The same batch three times", _agreement(probes.repeated)),
        ("The same image beside others", _agreement(probes.company)),
        ("Noise of a sixteenth of a grey level", _agreement(probes.tremor)),
        ("That noise leaves every logit the same", f"{output.unmoved} of {n}"),
        ("The softmax is exactly one-hot in float32", f"{output.one_hot} of {n}{margin}"),
        ("The outputs look like probabilities", f"{output.probabilities} of {n}{surest}"),
        ("Logits are not finite", f"{output.not_finite} of {n} within eps, {output.not_finite_beyond} beyond"),
    ]
    if (scale := probes.normalization) is not None:
        right = f"{scale.correct} of {scale.n} right as they are"
        if scale.best is not None:
            seen = f"{right}, {scale.best_correct} with {scale.best}{' undone' if scale.undone else ''}"
        else:
            seen = f"{right}; {f'none of {scale.tried} others is better' if scale.tried else 'no others tried'}"
        told.append(("Another scale of the images", seen))
    return told


def _images(report: ReportData, count: str, *, named: bool = True) -> str:
    """So many of so many, and of which classes where there are any."""
    probes = report.sanity.probes
    assert probes is not None
    parts = [(part.label, getattr(part, count), part.n) for part in probes.by_class]
    seen = sorted((part for part in parts if part[1]), key=lambda part: (-part[1] / part[2], part[0]))
    names = [f"{class_name(report.dataset.classes[label])} {some} of {n}" for label, some, n in seen]
    if len(names) > NAMED:
        names[NAMED:] = [f"{len(names) - NAMED} more"]
    share = f"{sum(some for _, some, _ in parts)} of {probes.n}"
    return f"{share}: {', '.join(names)}" if names and named else share


def _agreement(probe: AgreementProbe) -> str:
    labels = f"{probe.changed} of {probe.n} labels change"
    return labels if probe.difference is None else f"{labels}, logits by up to {probe.difference:.2g} of their spread"
