"""The model card of an exported model: what it is, how it was trained and measured, class by class, and how to load it.

Everything that comes from outside (names of classes, data, attacks, recipes) is text here: it can neither end a table,
a code block or the front matter, nor begin a link or markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from classwise.reporting.estimates import Interval
from classwise.reporting.formatting import plain
from classwise.reporting.leaderboard import model_name
from classwise.reporting.results import ReportData
from classwise.reporting.text import markdown_escaped as escaped
from classwise.reporting.text import number
from classwise.reporting.wording import report_verdict
from classwise.storage.verdicts import NATURAL

SNIPPET = """\
from model import load  # model.py of this directory: the architecture in plain PyTorch

model = load(".")  # needs torch and safetensors, and nothing else; takes NCHW images in [0, 1], gives logits
"""
"""What a user types in the directory; a test runs it."""


def model_card(
    report: ReportData,
    *,
    architecture: str,
    parameters: int,
    training: Mapping[str, Any] | None,
    repaired: Mapping[str, Any] | None = None,
) -> str:
    """``README.md`` with the front matter of the Hugging Face hub. ``training``, ``repaired``: the run's records."""
    return "\n".join(
        [
            *_front_matter(report),
            f"# {escaped(model_name(report))}",
            "",
            f"Measured: {escaped(report_verdict(report))}",
            "",
            f"An image classifier for {len(report.dataset.classes)} classes of {escaped(report.dataset.name)}: "
            f"{escaped(architecture)}, {parameters:,} parameters. It takes NCHW images in \\[0, 1\\]; whatever "
            "normalisation it needs is a part of it.",
            "",
            "## Robustness, class by class",
            "",
            *_table(report),
            "",
            "## How it was measured",
            "",
            *_measured(report),
            "",
            "## How it was trained",
            "",
            *_trained(training),
            *_repaired(repaired),
            "",
            "## How to load it",
            "",
            "```python",
            SNIPPET.rstrip("\n"),
            "```",
            "",
            "With classwise, `--model hf:DIR` names this directory, wherever a model is asked for. The classes are in "
            "`config.json`, in the order of the logits.",
            "",
        ]
    )


def _front_matter(report: ReportData) -> Iterator[str]:
    strongest = report[report.strongest]
    metrics = {"natural accuracy": report[NATURAL].overall.value}
    if report.strongest != NATURAL:
        threat = f"{report.threat.norm} {report.threat.eps_text}"
        metrics[f"accuracy under attack, {threat}"] = strongest.overall.value
        metrics[f"accuracy of the worst class under attack, {threat}"] = (
            strongest.worst.value if strongest.worst else None
        )
    data = _quoted(report.dataset.name)
    yield from ("---", "library_name: classwise", "pipeline_tag: image-classification")
    yield from ("tags:", "- adversarial-robustness", "- class-wise-robustness", "datasets:", f"- {data}")
    yield from ("model-index:", f"- name: {_quoted(model_name(report))}", "  results:")
    yield from ("  - task:", "      type: image-classification", "    dataset:")
    yield from (f"      name: {data}", f"      type: {data}", f"      split: {_quoted(report.dataset.split)}")
    yield "    metrics:"
    for name, value in metrics.items():
        if value is not None:
            yield from ("    - type: accuracy", f"      name: {_quoted(name)}", f"      value: {value:.4f}")
    yield from ("---", "")


def _table(report: ReportData) -> Iterator[str]:
    """A row for each class with the interval of every result, the worst class in bold."""
    keys = list(report.results)
    worst = {key: report[key].worst for key in keys}
    yield _row(["class", "n", *keys])
    yield f"| :-- | {' | '.join(['--:'] * (1 + len(keys)))} |"
    for label, name in enumerate(report.dataset.classes):
        parts = [report[key].by_class[label] for key in keys]
        bold = [(one := worst[key]) is not None and one.label == label for key in keys]
        yield _row([name, str(parts[-1].n), *map(_estimate, parts)], [False, False, *bold])
    overall = [report[key].overall for key in keys]
    yield _row(["all", str(overall[-1].n), *map(_estimate, overall)])


def _row(cells: list[str], bold: list[bool] | None = None) -> str:
    marks = ["**" if one else "" for one in bold or [False] * len(cells)]
    return f"| {' | '.join(mark + escaped(cell) + mark for mark, cell in zip(marks, cells, strict=True))} |"


def _estimate(part: Interval) -> str:
    return "–" if part.value is None else f"{number(part.value)} [{number(part.low)}, {number(part.high)}]"


def _measured(report: ReportData) -> Iterator[str]:
    data, threat = report.dataset, report.threat
    yield (
        f"Accuracies in percent with 95% Wilson intervals, on {data.n} images of {escaped(data.name)}/"
        f"{escaped(data.split)}, {escaped(threat.norm)} eps = {escaped(threat.eps_text)}. An image that is wrong "
        "untouched counts as broken; worst-case is pointwise over all attacks."
    )
    yield ""
    yield from (f"- {escaped(key)}: {escaped(info.settings)}" for key, info in report.attacks.items())
    if (worst := report.worst) is not None:
        low, high = number(worst.corrected.low), number(worst.corrected.high)
        yield (
            f"- The worst class is a minimum over noisy values and lies too low; corrected for that it is "
            f"{number(worst.corrected.value)} \\[{low}, {high}\\]."
        )
    yield from (f"- {escaped(finding.severity)}: {escaped(finding.text)}" for finding in report.sanity.findings)


def _trained(training: Mapping[str, Any] | None) -> Iterator[str]:
    if training is None:
        yield "The weights came without a record of their training."
        return
    asked = training.get("asked", {})
    yield f"By classwise {escaped(str(training.get('versions', {}).get('classwise', '')))}, by this recipe:"
    # Escapes leave no line of the block that could end it.
    yield from ("", "```json", json.dumps(asked, indent=1), "```")
    if training.get("best_epoch") is not None:
        rule = escaped(str(training.get("rule")))
        yield from ("", f"The best epoch by {rule} on validation images was {escaped(str(training['best_epoch']))}.")


def _repaired(repaired: Mapping[str, Any] | None) -> Iterator[str]:
    if repaired is not None:
        method, data = (escaped(str(repaired.get(key))) for key in ("method", "data"))
        choice = "" if repaired.get("choice") is None else f" ({escaped(str(repaired['choice']))})"
        yield from ("", f"It was then repaired with the method {method}{choice} on images of {data}.")


def _quoted(text: str) -> str:
    """A text as a double-quoted scalar of YAML on one line.

    >>> print(_quoted('a: "b" \\\\ c'))
    "a: \\"b\\" \\\\ c"
    """
    signs = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(signs.get(c, c if c.isprintable() else f"\\U{ord(c):08X}") for c in plain(text)) + '"'
