"""``classwise bench``: where the benches went."""

from __future__ import annotations

import typer

from classwise.cli.console import print_error

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> None:
    """Print where the benches went."""
    words = " ".join(["python -m benchmarks", *context.args])
    print_error(f"error: classwise bench is now `{words}`, run in a checkout of the repository of classwise")
    raise typer.Exit(2)
