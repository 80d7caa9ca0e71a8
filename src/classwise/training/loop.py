"""The training loop: one training, or several interleaved in one process.

Class statistics and the choice of the best epoch come from a class-balanced validation split of the training data; no
test data enters. The whole state is on disk after every epoch, so an interrupted run can be resumed; on a CPU the
result is bit-identical to that of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classwise.accelerate.threads import choose_threads
from classwise.core.errors import Diverged
from classwise.core.progress import Epoch, Progress
from classwise.storage.run_directory import RunDirectory
from classwise.training.epoch import run_epoch
from classwise.training.history import Record
from classwise.training.loggers import Logger, Loggers
from classwise.training.plan import Plan
from classwise.training.state import TrainingState


@dataclass(frozen=True, slots=True)
class Job:
    """A training to run, or to resume, in a run directory."""

    plan: Plan
    directory: RunDirectory
    resume: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training."""

    epochs: int
    best_epoch: int
    best_score: float
    history: list[Record]
    ended: str | None = None
    """Why training ended early."""


def fit(jobs: Sequence[Job], progress: Progress, loggers: Sequence[Logger] = ()) -> list[Outcome]:
    """Run trainings interleaved, one step of each in turn, each with its own random numbers.

    On a GPU each has its own stream, so that small runs share the device. Results equal those of separate runs. If a
    run diverges, the others continue, and the first ``Diverged`` is raised at the end. Progress and loggers are called
    between turns, so that they cannot change a run's random numbers.
    """
    cuda = list({job.plan.device for job in jobs if job.plan.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda), Loggers(loggers) as log:
        states = [TrainingState(job.plan, job.directory) for job in jobs]
        turns = [_Turn(state, alone=len(jobs) == 1) for state in states]
        for turn, job in zip(turns, jobs, strict=True):
            with turn:
                turn.state.start(resume=job.resume)
        start_progress([job.plan for job in jobs], sum(state.plan.steps(state.epoch) for state in states), progress)
        failures, running = [], [(turn, _epochs(turn.state)) for turn in turns]
        while running:
            for turn, steps in list(running):
                try:
                    with turn:
                        epoch = next(steps)
                    if epoch is None:
                        progress.advance()
                    else:
                        progress.epoch(epoch)
                        log.epoch(epoch)
                except (StopIteration, Diverged) as end:
                    running.remove((turn, steps))
                    turn.state.engine.reset()
                    failures += [end] if isinstance(end, Diverged) else []
        if failures:
            raise failures[0]
        progress.finish()
    return [_outcome(state) for state in states]


def start_progress(plans: Sequence[Plan], done: int, progress: Progress) -> None:
    """Report the names and the total number of steps of some trainings, of which ``done`` are finished."""
    title = " + ".join(dict.fromkeys(plan.name for plan in plans))
    progress.start(f"train {title}", sum(plan.steps(plan.epochs) for plan in plans), done)


def _epochs(state: TrainingState) -> Iterator[Epoch | None]:
    """Run the remaining epochs; yields None after every step and an ``Epoch`` after every epoch."""
    plan = state.plan
    while state.epoch < plan.epochs and not state.ended:
        yield from run_epoch(state)
        history = tuple(state.history)
        yield Epoch(run=state.directory.path, epochs=plan.epochs, classes=plan.task.classes, history=history)
    state.save_weights("last")


def _outcome(state: TrainingState) -> Outcome:
    assert state.best is not None
    epoch, score = state.best
    return Outcome(epochs=state.epoch, best_epoch=epoch, best_score=score, history=state.history, ended=state.ended)


class _Turn:
    """Context in which one of several trainings runs: its torch random state, number of threads and CUDA stream."""

    def __init__(self, state: TrainingState, *, alone: bool) -> None:
        self.state, self.device = state, state.plan.device
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda and not alone else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        phase = state.plan.phases[0]
        image = torch.zeros(1, *phase.shape, device=self.device)
        self.threads = choose_threads(state.engine.model, image, phase.batch_size)
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            torch.manual_seed(state.plan.seed)
            self.random = self._random_state()

    def __enter__(self) -> None:
        self.outer_threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.set_rng_state(self.random[0])
        if self.random[1] is not None:
            torch.cuda.set_rng_state(self.random[1], self.device)
        self.streaming = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        self.streaming.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.streaming.__exit__(*error)
        self.random = self._random_state()
        torch.set_num_threads(self.outer_threads)

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        cuda = self.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if cuda else None
