"""The section of a page on trust checks: findings, and the measurements behind them as rows."""

from __future__ import annotations

from classwise.reporting.formatting import class_name
from classwise.reporting.results import ReportData
from classwise.reporting.sanity import AgreementProbe

NAMED = 8
"""Maximum number of classes that a row names."""


def findings(report: ReportData) -> list[tuple[str, str, str]]:
    """Return severity, its label, and the text of each finding, the most severe first."""
    words = {"error": "Error", "warning": "Warning", "info": "Note"}
    return [(found.severity, words[found.severity], found.text) for found in report.sanity.at_least("info")]


def rows(report: ReportData) -> list[tuple[str, str]]:
    """Return each check and its result; nothing without checks."""
    probes = report.sanity.probes
    if probes is None:
        return []
    n, steps, output = probes.n, probes.steps[-1].step, probes.output
    rows = [
        ("Gradient is zero, lost in rounding or not finite", _images(report, "zero_gradient")),
        ("A small step along the gradient raises the loss far less than predicted", _images(report, "misled")),
        (f"The loss does not rise over {steps} steps, or falls again", _images(report, "slack")),
        ("Images that survive many steps", _images(report, "survived", named=False)),
        ("A single step breaks images that survive many steps", _images(report, "one_step")),
        ("Many steps break images that survive a single step", _images(report, "shielded", named=False)),
        (
            "Steps on the margin break images that survive steps on the cross-entropy",
            _images(report, "smooth", named=False),
        ),
        ("Images that survive in an unlimited ball", _images(report, "unreached")),
    ]
    if probes.black_box is not None:
        what = f"{probes.black_box.queries} black-box queries break images that survive many steps"
        rows.append((what, _images(report, "black_box")))
    surest = "" if output.surest is None else f"; maximum confidence {100 * output.surest:.0f}%"
    margin = "" if output.median_margin is None else f"; median margin {output.median_margin:.3g}"
    rows += [
        ("The same batch repeated three times", _agreement(probes.repeated)),
        ("The same image in another batch", _agreement(probes.company)),
        ("Noise of a sixteenth of a gray level", _agreement(probes.tremor)),
        ("Logits are bit-identical under that noise", f"{output.unmoved} of {n}"),
        ("Softmax is exactly one-hot in float32", f"{output.one_hot} of {n}{margin}"),
        ("Outputs are probabilities", f"{output.probabilities} of {n}{surest}"),
        ("Logits are not finite", f"{output.not_finite} of {n} within eps, {output.not_finite_beyond} beyond"),
    ]
    if (scale := probes.normalization) is not None:
        right = f"{scale.correct} of {scale.n} correct as given"
        if scale.best is not None:
            seen = f"{right}, {scale.best_correct} with {scale.best}{' undone' if scale.undone else ''}"
        else:
            others = f"none of {scale.tried} other scales is better" if scale.tried else "no other scales tried"
            seen = f"{right}; {others}"
        rows.append(("Images in another scale", seen))
    return rows


def _images(report: ReportData, count: str, *, named: bool = True) -> str:
    """Return the number of images of all, and of the classes concerned."""
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
