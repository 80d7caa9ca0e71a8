"""``classwise export``: a trained and evaluated model as a directory for others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import guarded, say, say_json


@guarded
def export(
    run: Annotated[Path, typer.Argument(help="A run directory with a report.")],
    to: Annotated[Path, typer.Option(help="A new directory: model.safetensors, config.json, README.md, ...")],
    weights: Annotated[
        Path | None, typer.Option(help="The weights of an evaluation that has no training beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the model of a run for others: weights, model card, code in plain PyTorch. It loads back as hf:DIR."""
    from classwise.export import export

    written = export(run, to, weights=weights)
    if as_json:
        say_json({"directory": str(written), "files": sorted(path.name for path in written.iterdir())})
    else:
        say(f"exported: {written}")
        say(f"next: classwise evaluate --model {shlex.quote(f'hf:{written}')} --data ... --out ...")
