"""``classwise repair``: a higher worst class for a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from classwise.cli.console import ConsoleProgress, say, say_command, say_json, table
from classwise.cli.parameters import Json, accepts
from classwise.config.options import RepairOptions

if TYPE_CHECKING:
    from classwise.reporting.repair import RepairReport


@accepts(RepairOptions)
def repair(options: dict[str, Any], as_json: Json = False) -> None:
    """Raise the worst-class robust accuracy of a trained model and evaluate the result on test images.

    The default method adds one constant per class to the logits, fitted to validation images; nothing is trained.

    Examples:
      classwise repair runs/trades --data digits --out runs/repaired
      classwise repair runs/trades --data digits --floor 20 --out runs/repaired
      classwise repair resnet18 --weights model.safetensors --data cifar10 --split train --per-class 500 --out runs/r
    """
    import classwise

    report = classwise.repair(**options, progress=ConsoleProgress()).report
    if as_json:
        say_json(report.model_dump(mode="json", by_alias=True))
        return
    for part in report.tables():
        if part.title != "Frontier":
            table(part.title, part.columns, part.rows)
            say("")
    for sentence in report.sentences():
        say(sentence)
    out = Path(options["out"])
    say(f"\npage: {out / 'repair.html'}")
    say_command("classwise", *_next_command(report, options["data"], out))


def _next_command(report: RepairReport, data: str, out: Path) -> list[object]:
    """Return the command that shows the effect of the repair."""
    if report.test is not None:
        return ["compare", out / "original", out]
    norm = [] if report.threat.norm == "Linf" else ["--norm", report.threat.norm]
    attack = ["--attack", "fast", "--eps", report.threat.eps_text, *norm]
    return ["evaluate", "--model", out, "--data", data, *attack, "--out", out]
