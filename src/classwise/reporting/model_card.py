"""The model card of an exported model: architecture, training, robustness by class, and how to load it.

Names of classes, data, attacks and recipes are escaped: they cannot end a table, a code block or the front matter, nor
start a link or markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from classwise.reporting.estimates import Interval
from classwise.reporting.formatting import plain
from classwise.reporting.leaderboard import model_name
from classwise.reporting.results import ReportData
from classwise.reporting.tables import Cell, Table
from classwise.reporting.text import markdown_escaped as escaped
from classwise.reporting.text import markdown_table, number
from classwise.reporting.wording import report_verdict
from classwise.storage.verdicts import NATURAL

SNIPPET = """\
from model import load  # model.py of this directory: the architecture in plain PyTorch

model = load(".")  # needs torch and safetensors only; takes NCHW images in [0, 1], returns logits
"""
"""Code that loads the model in its directory; a test runs it."""


def model_card(
    report: ReportData,
    *,
    architecture: str,
    parameters: int,
    training: Mapping[str, Any] | None,
    repaired: Mapping[str, Any] | None = None,
) -> str:
    """Return ``README.md`` with the front matter of the Hugging Face Hub.

    ``training``, ``repaired``: the records of the run.
    """
    lines = [
        f"# {escaped(model_name(report))}",
        "",
        f"Measured: {escaped(report_verdict(report))}",
        "",
        f"An image classifier for {len(report.dataset.classes)} classes of {escaped(report.dataset.name)}: "
        f"{escaped(architecture)}, {parameters:,} parameters. Input: NCHW images in \\[0, 1\\]; "
        "normalization is part of the model.",
        "",
        "## Robustness by class",
        "",
        *markdown_table(_table(report)),
        "",
        "## Evaluation",
        "",
        *_measured(report),
        "",
        "## Training",
        "",
        *_trained(training),
        *_repaired(repaired),
        "",
        "## Loading",
        "",
        "```python",
        SNIPPET.rstrip("\n"),
        "```",
        "",
        "With classwise: `--model hf:DIR`. `config.json` lists the classes in the order of the logits.",
        "",
    ]
    return "\n".join([*_front_matter(report), *lines])


def _front_matter(report: ReportData) -> Iterator[str]:
    strongest, threat = report[report.strongest], f"{report.threat.norm} {report.threat.eps_text}"
    metrics = {"natural accuracy": report[NATURAL].overall.value}
    if report.strongest != NATURAL:
        metrics[f"robust accuracy, {threat}"] = strongest.overall.value
        metrics[f"robust accuracy of the worst class, {threat}"] = strongest.worst.value if strongest.worst else None
    name, data, split = map(_quoted, (model_name(report), report.dataset.name, report.dataset.split))
    yield from ("---", "library_name: classwise", "pipeline_tag: image-classification", "tags:")
    yield from ("- adversarial-robustness", "- class-wise-robustness", "datasets:", f"- {data}", "model-index:")
    yield from (f"- name: {name}", "  results:", "  - task:", "      type: image-classification", "    dataset:")
    yield from (f"      name: {data}", f"      type: {data}", f"      split: {split}", "    metrics:")
    for metric, value in metrics.items():
        if value is not None:
            yield from ("    - type: accuracy", f"      name: {_quoted(metric)}", f"      value: {value:.4f}")
    yield from ("---", "")


def _table(report: ReportData) -> Table:
    """Return a row per class with the interval of every result, the worst class in bold."""
    results = list(report.results.values())
    worst = [result.worst.label if result.worst else None for result in results]
    rows = [
        [
            name,
            str(results[-1].by_class[label].n),
            *(_estimate(one.by_class[label], label == low) for one, low in zip(results, worst, strict=True)),
        ]
        for label, name in enumerate(report.dataset.classes)
    ]
    overall = [result.overall for result in results]
    rows.append(["all", str(overall[-1].n), *(_estimate(part, False) for part in overall)])
    return Table(title="", columns=[Cell("class", css="left"), "n", *report.results], rows=rows)


def _estimate(part: Interval, bold: bool) -> Cell:
    bounds = "" if part.low is None else f" [{number(part.low)}, {number(part.high)}]"
    return Cell(f"{number(part.value)}{bounds}", css="bold" if bold else "")


def _measured(report: ReportData) -> Iterator[str]:
    data, threat = report.dataset, report.threat
    yield (
        f"Accuracies in percent with 95% Wilson intervals, on {data.n} images of {escaped(data.name)}/"
        f"{escaped(data.split)}, {escaped(threat.norm)} eps = {escaped(threat.eps_text)}. An image that is "
        "misclassified without attack counts as broken; worst-case: minimum over all attacks, per example."
    )
    yield ""
    yield from (f"- {escaped(key)}: {escaped(info.settings)}" for key, info in report.attacks.items())
    if (worst := report.worst) is not None:
        yield (
            f"- Worst class, selection-corrected (for being the minimum over noisy values): "
            f"{escaped(_estimate(worst.corrected, False))}."
        )
    yield from (f"- {escaped(finding.severity)}: {escaped(finding.text)}" for finding in report.sanity.findings)


def _trained(training: Mapping[str, Any] | None) -> Iterator[str]:
    if training is None:
        yield "No record of the training is available."
        return
    recipe = training.get("asked", {})
    yield f"With classwise {escaped(str(training.get('versions', {}).get('classwise', '')))}, by this recipe:"
    # JSON escapes line breaks, so no line can end the block.
    yield from ("", "```json", json.dumps(recipe, indent=1), "```")
    if training.get("best_epoch") is not None:
        rule = escaped(str(training.get("rule")))
        yield from ("", f"Selected epoch, by {rule} on validation images: {escaped(str(training['best_epoch']))}.")


def _repaired(repaired: Mapping[str, Any] | None) -> Iterator[str]:
    if repaired is not None:
        method, data = (escaped(str(repaired.get(key))) for key in ("method", "data"))
        choice = "" if repaired.get("choice") is None else f" ({escaped(str(repaired['choice']))})"
        yield from ("", f"Repaired with {method}{choice} on images of {data}.")


def _quoted(text: str) -> str:
    """Return a text as a double-quoted YAML scalar on one line.

    >>> print(_quoted('a: "b" \\\\ c'))
    "a: \\"b\\" \\\\ c"
    """
    signs = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(signs.get(c, c if c.isprintable() else f"\\U{ord(c):08X}") for c in plain(text)) + '"'
