"""The commands: one a file. The only place that prints."""

from __future__ import annotations

import typer

from classwise.cli import check, compare, demo, evaluate, list_, train

app = typer.Typer(
    name="classwise",
    help="Class-wise adversarial robustness: find the class an attacker would pick, and train so that it holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("evaluate")(evaluate.evaluate)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("check")(check.check)
app.command("list")(list_.list_)


def main() -> None:
    """The console script."""
    app()
