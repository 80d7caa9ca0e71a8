"""``classwise repair``: lift the worst class of a finished model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json, table


@guarded
def repair(
    model: Annotated[str, typer.Argument(help="Run directory, architecture (with --weights), hf:org/name, ...")],
    data: Annotated[str, typer.Option(help="Data set, folder:PATH, or file.py:factory.")],
    out: Annotated[Path, typer.Option(help="Directory for the repaired model, repair.json and repair.html.")],
    floor: Annotated[
        float | None, typer.Option(help="Lift the worst class to this percentage at the least loss of the average.")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="Without --floor: rho, worst or tenth (highest mean of the weakest tenth).")
    ] = "rho",
    method: Annotated[str, typer.Option(help="See classwise list repairs; settings as name:key=value.")] = "bias",
    eps: Annotated[
        str | None, typer.Option(help="Radius, as 0.03 or 8/255. [default: that of the training, else 8/255]")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="Linf or L2. [default: that of the training, else Linf]")] = None,
    split: Annotated[
        str | None, typer.Option(help="Images to fit; never test. [default: the run's validation images]")
    ] = None,
    per_class: Annotated[int | None, typer.Option(help="Fit N random images of each class. [default: all]")] = None,
    targets: Annotated[
        int | None, typer.Option(help="Wrong classes to attack, the likeliest first. [default: all, at most 19]")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Attack or corruptions of the verdict; repeatable. [default: fast, corruptions:severity=3]"),
    ] = None,
    test_per_class: Annotated[
        int | None, typer.Option(help="Judge on the first N test images of each class. [default: all]")
    ] = None,
    verdict: Annotated[bool, typer.Option(help="Evaluate the model before and after on test images.")] = True,
    weights: Annotated[Path | None, typer.Option(help="safetensors, or .pt read as weights only.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images at a time; does not change results. [default: what fits]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU if there is one]")] = None,
    engine: Annotated[str, typer.Option(help="auto, compiled or eager; see classwise evaluate.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted repair.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print repair.json.")] = False,
) -> None:
    """Lift the worst class of a finished model without training it, and judge the result on test images."""
    import classwise

    found = classwise.repair(
        model,
        data,
        floor=floor,
        rule=rule,
        method=method,
        eps=eps,
        norm=norm,
        split=split,
        per_class=per_class,
        targets=targets,
        attacks=attack or ["fast", "corruptions:severity=3"],
        test_per_class=test_per_class,
        verdict=verdict,
        weights=weights,
        batch_size=batch_size,
        seed=seed,
        device=device,
        engine=engine,
        out=out,
        resume=resume,
        progress=ConsoleProgress(),
    )
    report = found.report
    if as_json:
        say_json(report.model_dump(mode="json", by_alias=True))
        return
    for part in report.tables():
        if part.title != "Frontier":
            table(part.title, part.columns, part.rows)
            say("")
    for sentence in report.sentences():
        say(sentence)
    say(f"\npage: {out / 'repair.html'}")
    say(f"next: classwise evaluate --model {shlex.quote(str(out))} --data {shlex.quote(data)} --out ...")
