"""``classwise analyze``: a question asked of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from classwise.cli.console import guarded, say, say_json, table
from classwise.errors import InputError, unknown


@guarded
def analyze(
    kind: Annotated[str, typer.Argument(help="Which question (see classwise list analyses).")],
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="Directory for KIND.json, KIND.parquet and KIND.html.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="A setting of the question as key=value.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The weights file of a model that was evaluated with --weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Ask why classes differ: confusion, training history, weights, features, and more."""
    from classwise.analysis import QUESTIONS
    from classwise.analysis.save import save
    from classwise.analysis.subject import Subject
    from classwise.recipes import parse_overrides
    from classwise.spec import convert

    if kind not in QUESTIONS:
        raise unknown("analysis", kind, QUESTIONS)
    question = QUESTIONS[kind]
    least, most = question.takes
    if not least <= len(runs) <= (most or len(runs)):
        raise InputError(f"{kind} takes {question.runs}, not {len(runs)} run directories")
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: --out names a directory")
    settings = convert(kind, question.ask, parse_overrides(override or []))
    subjects = [Subject(Subject.open(run).path, weights=weights) for run in runs]
    answer = question.ask(*subjects, **settings)
    files = []
    if out is not None:
        title = f"{kind}: {question.about}"
        files = save(answer, out, title=title, eyebrow=", ".join(subject.name for subject in subjects))
    if as_json:
        say_json(answer.model_dump(mode="json", by_alias=True))
        return
    for sentence in answer.sentences():
        say(sentence)
    for part in answer.tables():
        say("")
        table(part.title, part.columns, part.rows)
        say(part.about)
    if files:
        say(f"\npage: {files[-1]}")
