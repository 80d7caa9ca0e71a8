"""``classwise evaluate``: verdicts and report of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, estimate, guarded, number, say, say_json, table
from classwise.reporting import ClassReport
from classwise.reporting.charts import save_figures
from classwise.reporting.corruptions import Corruptions
from classwise.reporting.effort import StageInfo
from classwise.reporting.wording import SELECTED, allocation_sentence, audit_sentence


@guarded
def evaluate(
    model: Annotated[
        str, typer.Option(help="An architecture (with --weights), a run directory, file.py:factory, hf:org/name, ...")
    ],
    data: Annotated[str, typer.Option(help="A data set, folder:PATH, or file.py:factory.")],
    out: Annotated[Path, typer.Option(help="Directory for verdicts, report.json and report.html.")],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="As name or name:key=value,...; or corruptions, or file.py:name; may be repeated. [default: pgd]"
        ),
    ] = None,
    eps: Annotated[
        str | None, typer.Option(help="Radius, as 0.03 or 8/255. [default: the attack's, else 8/255]")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="Linf or L2. [default: the attack's, else Linf]")] = None,
    per_class: Annotated[
        int | None, typer.Option(help="Use the first N examples of each class. [default: all]")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors, or .pt read as weights only.")] = None,
    split: Annotated[str, typer.Option(help="Which part of the data.")] = "test",
    batch_size: Annotated[
        int | None, typer.Option(help="Examples at a time; does not change results. [default: what fits]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the attacks' random starts.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU where there is one]")] = None,
    engine: Annotated[
        str, typer.Option(help="auto or compiled: attacks search a faster twin of the model; eager: the model itself.")
    ] = "auto",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="fast: the whole ensemble on all that the cascade left.")
    ] = False,
    until_worst_ci: Annotated[
        float | None, typer.Option(help="Stop when the worst class is known to so many points, as 2. [default: never]")
    ] = None,
    margins: Annotated[
        bool,
        typer.Option(
            "--margins",
            help="Also save margins.parquet, for repair and analyze bias-share; attacks up to 19 wrong classes.",
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted evaluation.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Let a model that is a program run (torchscript:).")] = False,
    figures: Annotated[Path | None, typer.Option(help="Draw the charts as SVG and PNG into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Attack a model and report its accuracy class by class, with intervals."""
    import classwise

    report = classwise.evaluate(
        model,
        data,
        attacks=attack or ["pgd"],
        eps=eps,
        norm=norm,
        weights=weights,
        split=split,
        per_class=per_class,
        batch_size=batch_size,
        seed=seed,
        device=device,
        engine=engine,
        exhaustive=exhaustive,
        until_worst_ci=until_worst_ci,
        margins=margins,
        out=out,
        resume=resume,
        trust=trust,
        progress=ConsoleProgress(),
    )
    if figures is not None:
        save_figures(report, figures)
    if as_json:
        say_json(report.model_dump(mode="json", by_alias=True))
    else:
        show(report)
        say(f"\npage: {out / 'report.html'}")


def show(report: ClassReport) -> None:
    """The report as two tables."""
    data, threat = report.dataset, report.threat
    table(
        f"{data.name}/{data.split}, {data.n} images, {threat.norm} eps = {threat.eps_text}",
        ["accuracy, %", "overall [95%]", "worst class", "worst [95%]", "corrected", "CV", "MCD"],
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
    say("")
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
    for key, attack in report.attacks.items():
        if attack.stages:
            say("")
            _show_stages(key, attack.stages)
        if attack.audit:
            say(audit_sentence(attack.audit))
    if (told := allocation_sentence(report)) is not None:
        say(f"\n{told}")
    if report.corruptions is not None:
        say("")
        _show_corruptions(report.corruptions)
    if report.sanity.findings:
        say("")
    for finding in report.sanity.findings:
        say(f"{finding.severity}: {finding.text}")


def _show_stages(key: str, stages: list[StageInfo]) -> None:
    table(
        f"{key}, stage by stage",
        ["stage", "for", "attacked", "broke", "forwards", "backwards", "seconds"],
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
