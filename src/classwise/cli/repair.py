"""``classwise repair``: lift the worst class of a finished model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json, table

if TYPE_CHECKING:
    from classwise.reporting.repair import RepairReport


@guarded
def repair(
    model: Annotated[str, typer.Argument(help="Run directory, architecture (with --weights), hf:org/name, ...")],
    data: Annotated[str, typer.Option(help="Data set, folder:PATH, or file.py:factory.")],
    out: Annotated[Path, typer.Option(help="Directory for the repaired model, repair.json and repair.html.")],
    floor: Annotated[
        float | None,
        typer.Option(
            help="Minimum robust accuracy of the worst class in percent, as 20, cross-validated on the fitting images; "
            "not guaranteed on test images (method bias)."
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Selection without --floor (method bias): rho (relative gain of the worst class minus relative loss "
            "of the average), worst, or tenth (mean of the weakest tenth of the classes). [default: rho]"
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Repair method as name or name:key=value; see classwise list repairs.")
    ] = "bias",
    eps: Annotated[
        str | None, typer.Option(help="Radius, as 0.03 or 8/255. [default: that of the training, else 8/255]")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="Linf or L2. [default: that of the training, else Linf]")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split to fit to, as train; test is refused. Not needed for a run directory on its own data, which "
            "uses its validation images."
        ),
    ] = None,
    per_class: Annotated[int | None, typer.Option(help="Random fitting images of each class. [default: all]")] = None,
    targets: Annotated[
        int | None,
        typer.Option(
            help="Wrong classes attacked per image, the likeliest first (method bias). [default: all, at most 19]"
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Attack, or corruptions, of the test evaluation; repeatable, replaces the default. "
            "[default: fast, corruptions:severity=3]"
        ),
    ] = None,
    test_per_class: Annotated[
        int | None, typer.Option(help="Use the first N test images of each class. [default: all]")
    ] = None,
    evaluate: Annotated[bool, typer.Option(help="Evaluate the original and the repaired model on test images.")] = True,
    weights: Annotated[
        Path | None, typer.Option(help="Weights file: .safetensors, or .pt loaded as weights only.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images at a time; does not change results. [default: what fits]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU if there is one]")] = None,
    engine: Annotated[str, typer.Option(help="auto, compiled or eager; see classwise evaluate.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted margin search or test evaluation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print repair.json.")] = False,
) -> None:
    """Raise the robust accuracy of a finished model's worst class, and evaluate the result on test images."""
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
        evaluate=evaluate,
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
    say(f"next: {_following(report, data, out)}")


def _following(report: RepairReport, data: str, out: Path) -> str:
    """The command that a user needs next."""
    if report.test is not None:
        return shlex.join(["classwise", "compare", str(out / "original"), str(out)])
    words = ["classwise", "evaluate", "--model", str(out), "--data", data, "--attack", "fast"]
    words += [
        "--eps",
        report.threat.eps_text,
        *([] if report.threat.norm == "Linf" else ["--norm", report.threat.norm]),
    ]
    return shlex.join([*words, "--out", str(out)])
