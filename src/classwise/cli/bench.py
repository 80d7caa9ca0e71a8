"""``classwise bench``: moved to ``python -m benchmarks``."""

from __future__ import annotations

import typer

from classwise.cli.console import print_error

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> None:
    """Print the command that replaces this one."""
    words = " ".join(["python -m benchmarks", *context.args])
    print_error(f"error: classwise bench has moved: run `{words}` in a checkout of the classwise repository")
    raise typer.Exit(2)
