"""Run a study: train, evaluate, analyze, and write all results to one page.

Runs are in ``OUT/runs/<name>``, results in ``OUT/analyses``. On resumption, finished runs are reused and interrupted
ones continued; the analyses are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from classwise.analysis import ANALYSES, AnalysisResult, Run, analyze
from classwise.analysis.retraining import run_all
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
class StudyResult:
    """The page of a study, and the results of its analyses."""

    page: Path
    results: dict[str, AnalysisResult]


def conduct(
    study: Study, out: Path, *, name: str, resume: bool = False, workers: int = 1, progress: Progress = SILENT
) -> StudyResult:
    """Run a study, with ``workers`` runs at a time. Invalid input is reported before anything starts."""
    check_workers(workers)
    for analysis in study.analyses:
        if analysis.kind not in ANALYSES:
            raise unknown("analysis", analysis.kind, ANALYSES)
    jobs = [
        (out / "runs" / run, load_recipe(wanted.recipe, wanted.overrides), wanted.evaluate)
        for run, wanted in study.trainings.items()
    ]
    if out.exists() and any(out.iterdir()) and not resume:
        raise InputError(f"{out} is not empty; pass --resume to continue the study in it, or another --out")
    run_all(workers, _train_and_evaluate, jobs, "runs", progress)
    results: dict[str, AnalysisResult] = {}
    for analysis in study.analyses:
        runs = [Run.open(out / "runs" / run) for part in analysis.runs for run in study.trainings_of(part)]
        key, stem = f"{analysis.kind}, {', '.join(analysis.runs)}", "-".join([analysis.kind, *analysis.runs])
        if key in results:
            key, stem = f"{key} ({len(results)})", f"{stem}-{len(results)}"
        results[key] = analyze(analysis.kind, runs, analysis.settings, progress)
        results[key].write(out / "analyses", stem)
    page = out / "analyses.html"
    write_text(page, answers_page(name, study.about, results))
    return StudyResult(page=page, results=results)


def _train_and_evaluate(job: tuple[Path, Recipe, Evaluation], progress: Progress = SILENT) -> None:
    """Train and evaluate one run; resume what is unfinished."""
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
