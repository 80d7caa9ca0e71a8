"""Conducting a study: train, evaluate, ask, and put all answers on one page.

Runs lie in ``OUT/runs/<name>``, answers in ``OUT/analyses``. Taken up again, finished runs are read and broken-off ones
continued; questions are asked anew, of runs that are all there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from classwise.analysis import QUESTIONS, Answer, Subject, ask
from classwise.analysis.save import write
from classwise.api import evaluate, train
from classwise.errors import InputError, unknown
from classwise.files import write_text
from classwise.progress import SILENT, Progress
from classwise.recipes import load_recipe
from classwise.reporting.pages import answers_page
from classwise.studies import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Conducted:
    """What a study came to."""

    page: Path
    answers: dict[str, Answer]


def conduct(study: Study, out: Path, *, name: str, resume: bool = False, progress: Progress = SILENT) -> Conducted:
    """Do everything a study names. Whatever is wrong with it is said before anything starts."""
    for asked in study.analyses:
        if asked.kind not in QUESTIONS:
            raise unknown("analysis", asked.kind, QUESTIONS)
    recipes = {run: load_recipe(wanted.recipe, wanted.overrides) for run, wanted in study.runs.items()}
    if out.exists() and any(out.iterdir()) and not resume:
        raise InputError(f"{out} is not empty: add --resume to continue the study in it, or choose another --out")
    for run, recipe in recipes.items():
        place, how = out / "runs" / run, study.runs[run].evaluate
        train(recipe, out=place, resume=True, progress=progress)
        evaluate(
            str(place),
            recipe.data.name,
            attacks=how.attacks,
            eps=recipe.eps if how.eps is None else how.eps,
            norm=recipe.norm,
            per_class=how.per_class,
            out=place,
            resume=True,
            progress=progress,
        )
    answers: dict[str, Answer] = {}
    for asked in study.analyses:
        subjects = [Subject.open(out / "runs" / run) for run in asked.runs]
        answer = ask(asked.kind, subjects, asked.settings, progress)
        key = f"{asked.kind}, {', '.join(asked.runs)}"
        answers[key if key not in answers else f"{key} ({len(answers)})"] = answer
        write(answer, out / "analyses", "-".join([asked.kind, *asked.runs]))
    page = out / "analyses.html"
    write_text(page, answers_page(name, study.about, answers))
    return Conducted(page=page, answers=answers)
