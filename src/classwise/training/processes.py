"""Several trainings at the same time, each in a worker process.

Useful for small models on a GPU, which are launch-bound: a single process that alternates between runs cannot keep the
device busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from classwise.core.progress import Epoch, Progress
from classwise.storage.run_directory import RunDirectory
from classwise.training.history import read_history
from classwise.training.loggers import Logger, Loggers
from classwise.training.loop import Job, Outcome, fit, start_progress
from classwise.training.plan import Plan
from classwise.training.workers import Send, run_jobs

Task = tuple[int, Callable[[], Plan], RunDirectory, bool]
"""A job in a form that can be pickled: number, factory of the plan, directory, whether to resume."""


def fit_in_processes(
    jobs: Sequence[Job],
    plans: Sequence[Callable[[], Plan]],
    workers: int,
    progress: Progress,
    loggers: Sequence[Logger] = (),
) -> list[Outcome]:
    """Run the jobs as ``fit`` does, but in ``workers`` processes, which build their plans by the given factories."""
    tasks = [
        (number, plan, job.directory, job.resume) for number, (job, plan) in enumerate(zip(jobs, plans, strict=True))
    ]
    with Loggers(loggers) as log:
        start_progress([job.plan for job in jobs], 0, progress)

        def receive(message: tuple[str, int, int]) -> None:
            kind, number, amount = message
            if kind == "advance":
                progress.advance(amount)
                return
            job = jobs[number]
            epoch = Epoch(
                run=job.directory.path,
                epochs=job.plan.epochs,
                classes=job.plan.task.classes,
                history=tuple(read_history(job.directory.metrics)[:amount]),
            )
            progress.epoch(epoch)
            log.epoch(epoch)

        outcomes = run_jobs(workers, _fit, tasks, receive)
        progress.finish()
    return outcomes


def _fit(task: Task, send: Send) -> Outcome:
    number, plan, directory, resume = task
    return fit([Job(plan(), directory, resume)], _SentProgress(number, send))[0]


class _SentProgress(Progress):
    """Sends progress to the parent process."""

    def __init__(self, number: int, send: Send) -> None:
        self.number, self.send = number, send

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.send(("advance", self.number, done))

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.send(("advance", self.number, amount))

    def epoch(self, epoch: Epoch) -> None:
        self.send(("epoch", self.number, len(epoch.history)))

    def finish(self) -> None:
        pass
