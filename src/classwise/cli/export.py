"""``classwise export``: a trained and evaluated model as a directory for publication."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import say, say_command, say_json
from classwise.cli.parameters import Json, Weights, output


def export(
    run: Annotated[Path, typer.Argument(help="Run directory with a report.", metavar="RUN")],
    to: Annotated[Path, output("New directory for model.safetensors, config.json, README.md, ...")],
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Write the model of a run for publication: weights, model card, plain PyTorch code. Load it with --model hf:DIR.

    Examples:
      classwise export runs/wat --to wat-model
    """
    from classwise.export import export

    written = export(run, to, weights=weights)
    if as_json:
        say_json({"directory": str(written), "files": sorted(path.name for path in written.iterdir())})
    else:
        say(f"exported: {written}")
        say_command("classwise", "evaluate", "--model", f"hf:{written}", "--data", "DATA", "--out", "DIR")
