"""The measurements of the trust checks as a table."""

from __future__ import annotations

from classwise.reporting.formatting import class_name
from classwise.reporting.results import ReportData
from classwise.reporting.sanity import AgreementProbe, NormalizationProbe, Probes
from classwise.reporting.tables import Table

NAMED = 8
"""Maximum number of classes that a row names."""


def trust_table(report: ReportData) -> Table | None:
    """Return each check and its result; None without checks."""
    probes = report.sanity.probes
    if probes is None:
        return None
    n, output, classes = probes.n, probes.output, report.dataset.classes
    counts = [
        ("Gradient is zero, lost in rounding or not finite", "zero_gradient", classes),
        ("A small step along the gradient raises the loss far less than predicted", "misled", classes),
        (f"The loss does not rise over {probes.steps[-1].step} steps, or falls again", "slack", classes),
        ("Images that survive many steps", "survived", None),
        ("A single step breaks images that survive many steps", "one_step", classes),
        ("Many steps break images that survive a single step", "shielded", None),
        ("Steps on the margin break images that survive steps on the cross-entropy", "smooth", None),
        ("Images that survive in an unlimited ball", "unreached", classes),
    ]
    if probes.black_box is not None:
        what = f"{probes.black_box.queries} black-box queries break images that survive many steps"
        counts.append((what, "black_box", classes))
    surest = "" if output.surest is None else f"; maximum confidence {100 * output.surest:.0f}%"
    margin = "" if output.median_margin is None else f"; median margin {output.median_margin:.3g}"
    rows = [
        *([what, _images(probes, field, names)] for what, field, names in counts),
        ["The same batch repeated three times", _agreement(probes.repeated)],
        ["The same image in another batch", _agreement(probes.company)],
        ["Noise of a sixteenth of a gray level", _agreement(probes.tremor)],
        ["Logits are bit-identical under that noise", f"{output.unmoved} of {n}"],
        ["Softmax is exactly one-hot in float32", f"{output.one_hot} of {n}{margin}"],
        ["Outputs are probabilities", f"{output.probabilities} of {n}{surest}"],
        ["Logits are not finite", f"{output.not_finite} of {n} within eps, {output.not_finite_beyond} beyond"],
    ]
    if probes.normalization is not None:
        rows.append(["Images in another scale", _scales(probes.normalization)])
    return Table(title="Trust checks", columns=["Check", "Result"], rows=rows, css="text")


def _images(probes: Probes, count: str, classes: list[str] | None = None) -> str:
    """Return the number of images of all and, given their names, of the classes concerned."""
    seen = [(part.label, getattr(part, count), part.n) for part in probes.by_class if getattr(part, count)]
    share = f"{sum(some for _, some, _ in seen)} of {probes.n}"
    if not seen or classes is None:
        return share
    seen.sort(key=lambda part: (-part[1] / part[2], part[0]))
    names = [f"{class_name(classes[label])} {some} of {n}" for label, some, n in seen]
    if len(names) > NAMED:
        names[NAMED:] = [f"{len(names) - NAMED} more"]
    return f"{share}: {', '.join(names)}"


def _agreement(probe: AgreementProbe) -> str:
    labels = f"{probe.changed} of {probe.n} labels change"
    return labels if probe.difference is None else f"{labels}, logits by up to {probe.difference:.2g} of their spread"


def _scales(probe: NormalizationProbe) -> str:
    right = f"{probe.correct} of {probe.n} correct as given"
    if probe.best is not None:
        return f"{right}, {probe.best_correct} with {probe.best}{' undone' if probe.undone else ''}"
    return f"{right}; {f'none of {probe.tried} other scales is better' if probe.tried else 'no other scales tried'}"
