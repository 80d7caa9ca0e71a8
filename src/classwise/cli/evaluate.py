"""``classwise evaluate``: accuracy of one model class by class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from classwise.cli.console import ConsoleProgress, estimate, number, say, say_json, table
from classwise.cli.parameters import Figures, Json, accepts
from classwise.config.options import EvaluateOptions

if TYPE_CHECKING:
    from classwise.reporting import ClassReport
    from classwise.reporting.corruptions import Corruptions
    from classwise.reporting.effort import StageInfo


@accepts(EvaluateOptions)
def evaluate(options: dict[str, Any], figures: Figures = None, as_json: Json = False) -> None:
    """Attack a model and report its accuracy class by class, with 95% intervals.

    An example counts as broken only if a float32 forward pass of the original model (attacks may search an optimized
    copy) confirms it on an image inside the ball and in [0, 1].

    Examples:
      classwise evaluate --model runs/wat --data digits --eps 0.2 --out runs/wat
      classwise evaluate --model runs/wat --data digits --eps 0.2 --attack fast --attack corruptions --out runs/fast
      classwise evaluate --model resnet18 --weights trades.safetensors --data cifar10 --attack pgd:steps=50 --out runs/x
    """
    import classwise

    report = classwise.evaluate(**options, progress=ConsoleProgress())
    if figures is not None:
        from classwise.reporting.charts import save_figures

        save_figures(report, figures)
    if as_json:
        say_json(report.model_dump(mode="json", by_alias=True))
    else:
        show(report)
        say(f"\npage: {Path(options['out']) / 'report.html'}")


def show(report: ClassReport) -> None:
    """Print a report: overall, class by class, stages of attacks, corruptions, findings."""
    from classwise.reporting.wording import allocation_sentence, audit_sentence

    _show_results(report)
    say("")
    _show_classes(report)
    for key, attack in report.attacks.items():
        if attack.stages:
            say("")
            _show_stages(key, attack.stages)
        if attack.audit:
            say(audit_sentence(attack.audit))
    if (sentence := allocation_sentence(report)) is not None:
        say(f"\n{sentence}")
    if report.corruptions is not None:
        say("")
        _show_corruptions(report.corruptions)
    if report.sanity.findings:
        say("")
    for finding in report.sanity.findings:
        say(f"{finding.severity}: {finding.text}")


def _show_results(report: ClassReport) -> None:
    data, threat = report.dataset, report.threat
    table(
        f"{data.name}/{data.split}, {data.n} images, {threat.norm} eps = {threat.eps_text}",
        ["accuracy, %", "overall [95%]", "worst class", "worst [95%]", "selection-corrected", "CV", "MCD"],
        [
            [
                key,
                estimate(result.overall),
                result.worst.name if result.worst else "–",
                estimate(result.worst),
                number(result.worst.corrected.value if result.worst else None),
                number(result.cv),
                number(result.mcd),
            ]
            for key, result in report.results.items()
        ],
    )
    say("CV: variance of the class accuracies; MCD: highest minus lowest class accuracy")


def _show_classes(report: ClassReport) -> None:
    keys = list(report.results)
    values = [part.value for part in report[report.strongest].by_class]
    weakest_first = sorted(range(len(values)), key=lambda label: (values[label] is None, values[label] or 0.0))
    table(
        "by class, weakest first",
        ["class", "n", *(f"{key} [95%]" for key in keys)],
        [
            [
                report.dataset.classes[label],
                str(report[keys[0]].by_class[label].n),
                *(estimate(report[key].by_class[label]) for key in keys),
            ]
            for label in weakest_first
        ],
    )


def _show_stages(key: str, stages: list[StageInfo]) -> None:
    from classwise.reporting.wording import SELECTED

    table(
        f"{key}, stage by stage",
        ["stage", "examples", "attacked", "broke", "forwards", "backwards", "seconds"],
        [
            [
                stage.name,
                SELECTED.get(stage.whom, stage.whom),
                str(stage.attacked),
                str(stage.broke),
                f"{stage.forwards:,}",
                f"{stage.backwards:,}",
                number(stage.seconds),
            ]
            for stage in stages
        ],
    )


def _show_corruptions(corruptions: Corruptions) -> None:
    severities = sorted({result.severity for result in corruptions.results})
    kinds = dict.fromkeys((result.family, result.kind) for result in corruptions.results)
    values = {(result.kind, result.severity): result.overall.value for result in corruptions.results}
    table(
        "corruptions, accuracy by severity, %",
        ["family", "kind", *map(str, severities)],
        [[family, kind, *(number(values.get((kind, severity))) for severity in severities)] for family, kind in kinds],
        numbers=False,
    )
    say("")
    table(
        "corruptions, mean by family and class, %",
        ["class", *(family.family for family in corruptions.families)],
        [
            [part.name, *(estimate(family.by_class[label]) for family in corruptions.families)]
            for label, part in enumerate(corruptions.families[0].by_class)
        ],
    )
