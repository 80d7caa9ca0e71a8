"""Trainings in processes of their own, several at a time.

For runs whose steps are so small that a processor is busier with telling the device what to do than the device with
doing it: taking turns in one process they would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from classwise.core.progress import Epoch, Progress
from classwise.storage.run_directory import RunDirectory
from classwise.training.history import read_history
from classwise.training.loggers import Logger, Loggers
from classwise.training.loop import Job, Outcome, Plan, announce, fit
from classwise.training.workers import Tell, done_by

Place = tuple[int, Callable[[], Plan], RunDirectory, bool]
"""A training that can be sent to a process: its number, how its plan is made, its directory, whether it goes on."""


def fit_apart(
    jobs: Sequence[Job],
    plans: Sequence[Callable[[], Plan]],
    workers: int,
    progress: Progress,
    loggers: Sequence[Logger] = (),
) -> list[Outcome]:
    """The same as ``fit``, by so many processes, each of which makes its plans anew."""
    places = [
        (number, plan, job.directory, job.resume) for number, (job, plan) in enumerate(zip(jobs, plans, strict=True))
    ]
    with Loggers(loggers) as log:
        announce([job.plan for job in jobs], 0, progress)

        def heard(said: tuple[str, int, int]) -> None:
            what, number, amount = said
            if what == "advance":
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

        outcomes = done_by(workers, _fit, places, heard)
        progress.finish()
    return outcomes


def _fit(place: Place, tell: Tell) -> Outcome:
    number, plan, directory, resume = place
    return fit([Job(plan(), directory, resume)], _Teller(number, tell))[0]


class _Teller(Progress):
    """Progress that is told to another process."""

    def __init__(self, number: int, tell: Tell) -> None:
        self.number, self.tell = number, tell

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.tell(("advance", self.number, done))

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.tell(("advance", self.number, amount))

    def epoch(self, epoch: Epoch) -> None:
        self.tell(("epoch", self.number, len(epoch.history)))

    def finish(self) -> None:
        pass
