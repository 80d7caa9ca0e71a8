"""Conducting a study: train, evaluate, ask, and put all answers on one page.

Runs lie in ``OUT/runs/<name>``, answers in ``OUT/analyses``. Taken up again, finished runs are read and broken-off ones
continued; questions are asked anew, of runs that are all there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from classwise.analysis import QUESTIONS, Answer, Subject, ask
from classwise.analysis.retraining import each_done
from classwise.analysis.save import write
from classwise.api.evaluate import evaluate
from classwise.api.train import train
from classwise.config.recipes import Recipe, load_recipe
from classwise.core.errors import InputError, unknown
from classwise.core.progress import SILENT, Progress
from classwise.reporting.pages import answers_page
from classwise.storage.files import write_text
from classwise.studies import Evaluation, Study
from classwise.training.workers import check_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Conducted:
    """What a study came to."""

    page: Path
    answers: dict[str, Answer]


def conduct(
    study: Study, out: Path, *, name: str, resume: bool = False, workers: int = 1, progress: Progress = SILENT
) -> Conducted:
    """Do everything a study names, with workers several runs at a time.

    Whatever is wrong with it is said before anything starts.
    """
    check_workers(workers)
    for asked in study.analyses:
        if asked.kind not in QUESTIONS:
            raise unknown("analysis", asked.kind, QUESTIONS)
    jobs = [
        (out / "runs" / run, load_recipe(wanted.recipe, wanted.overrides), wanted.evaluate)
        for run, wanted in study.trainings.items()
    ]
    if out.exists() and any(out.iterdir()) and not resume:
        raise InputError(f"{out} is not empty: add --resume to continue the study in it, or choose another --out")
    each_done(workers, _do, jobs, "runs", progress)
    answers: dict[str, Answer] = {}
    for asked in study.analyses:
        subjects = [Subject.open(out / "runs" / run) for some in asked.runs for run in study.trainings_of(some)]
        answer = ask(asked.kind, subjects, asked.settings, progress)
        key, file = f"{asked.kind}, {', '.join(asked.runs)}", "-".join([asked.kind, *asked.runs])
        if key in answers:
            key, file = f"{key} ({len(answers)})", f"{file}-{len(answers)}"
        answers[key] = answer
        write(answer, out / "analyses", file)
    page = out / "analyses.html"
    write_text(page, answers_page(name, study.about, answers))
    return Conducted(page=page, answers=answers)


def _do(job: tuple[Path, Recipe, Evaluation], progress: Progress = SILENT) -> None:
    """Train and evaluate one run, or what is left to do of it."""
    place, recipe, how = job
    train(recipe, out=place, resume=True, progress=progress)
    evaluate(
        str(place),
        recipe.data_at_the_end,
        attacks=how.attacks,
        eps=recipe.eps if how.eps is None else how.eps,
        norm=recipe.norm,
        per_class=how.per_class,
        margins=how.margins,
        out=place,
        resume=True,
        progress=progress,
    )
