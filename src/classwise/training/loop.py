"""The one training loop.

Class statistics and the choice of the best epoch come from a class-balanced validation split cut from the
training data. Nothing here can receive test data. After every epoch the whole state is on disk, so a run that was
killed continues and ends, on a CPU, with the very weights it would have had.
"""

# B batch, K classes

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from classwise.accelerate.threads import fitting_threads
from classwise.core.choices import Rule
from classwise.core.errors import Diverged, InputError, one_line
from classwise.core.model_calls import frozen, logits_of
from classwise.core.progress import Epoch, Progress
from classwise.core.streams import ExampleNoise, PartNoise, Randomness
from classwise.core.types import Attack, ClassControls, ClassStats, Objective, Policy, Task
from classwise.data import Batches, ImageSet, MixedBatches, ordered, share_of
from classwise.metrics.counts import Ints
from classwise.storage.files import write_json
from classwise.storage.run_directory import RunDirectory
from classwise.training.averaging import FAWA, Average, FAWASettings, WeightAverage
from classwise.training.checkpoint import load_state, save_state, save_weights
from classwise.training.compiled import CompiledEngine
from classwise.training.distributed import ALONE, Team
from classwise.training.engine import Engine, Precision
from classwise.training.history import Record, controls_record, summary, write_history
from classwise.training.loggers import Logger, Loggers
from classwise.training.optimizers import OptimizerSettings
from classwise.training.overfitting import STRONGEST, Guard, robust_share
from classwise.training.phases import Phase, phase_of
from classwise.training.schedules import Schedule
from classwise.training.selection import score
from classwise.training.weight_perturbation import WeightPerturbation

CHECK_EVERY = 50
"""Steps between looks at the loss; each look waits for the device."""
BLOW_UP = 10.0
"""A mean loss this many times that of the first epoch counts as divergence."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a training needs, built and validated."""

    name: str
    model: nn.Module
    phases: tuple[Phase, ...]
    """One after the other; most trainings have one."""
    train: Ints
    validation: Ints
    """Which of the images are trained on, and which are held out."""
    extra: ImageSet | None
    """Further images to train on, labelled by a model."""
    task: Task
    objective: Objective
    policy: Policy
    optimizer: OptimizerSettings
    schedule: Schedule
    epochs: int
    flip: bool
    ema: float
    fawa: FAWASettings | None
    awp: WeightPerturbation | None
    clip: float | None
    precision: Precision
    engine: Literal["eager", "compiled"]
    select: Rule
    patience: int | None
    """Epochs without a better one after which training ends."""
    guard: Guard | None
    judge: Attack
    """The attack that measures robust accuracy on validation, the same whatever the objective."""
    seed: int
    device: torch.device
    team: Team = ALONE

    @property
    def num_classes(self) -> int:
        """K."""
        return self.task.num_classes

    @property
    def images(self) -> ImageSet:
        """Those of the first phase."""
        return self.phases[0].images

    @property
    def batch_size(self) -> int:
        """That of the first phase."""
        return self.phases[0].batch_size

    def steps(self, epochs: int) -> int:
        """How many batches the first so many epochs have."""
        phases = (self.phases[phase_of(self.phases, epoch)] for epoch in range(epochs))
        parts = (divmod(len(self.train), self.own(one)) for one in phases)
        return sum(whole + (rest >= self.least) for whole, rest in parts)

    @property
    def least(self) -> int:
        """The examples that a batch must have: one for every process, and batch norm has no statistics of one."""
        return max(2, self.team.size)

    def own(self, phase: Phase) -> int:
        """How many of a batch are not extra images."""
        return phase.batch_size if self.extra is None else phase.batch_size - phase.batch_size // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training ended."""

    epochs: int
    best_epoch: int
    best_score: float
    history: list[Record]
    ended: str | None = None
    """Why it ended before its time."""


def make_engine(plan: Plan, model: nn.Module) -> Engine:
    """The moving parts of a plan, around a model of its kind."""
    kind = CompiledEngine if plan.engine == "compiled" else Engine
    return kind(
        model=model,
        objective=plan.objective,
        policy=plan.policy,
        optimizer=plan.optimizer.build(model.parameters()),
        average=_average(plan, model),
        precision=plan.precision,
        clip=plan.clip,
        awp=plan.awp,
        team=plan.team,
    )


def _average(plan: Plan, model: nn.Module) -> Average | None:
    if plan.fawa is not None:
        return FAWA(model, plan.fawa)
    return WeightAverage(model, plan.ema) if plan.ema else None


def make_batches(plan: Plan, generator: torch.Generator, phase: int = 0) -> Batches | MixedBatches:
    """The training data of a phase, in random order, half of every batch from the extra images where there are some."""
    now = plan.phases[phase]
    size = plan.own(now)
    looks: dict[str, Any] = {"device": plan.device, "generator": generator, "crop": now.crop, "flip": plan.flip}
    looks |= {"part": now.part, "size": now.size, "share": plan.team.share}
    small = 0 < len(plan.train) % size < plan.least
    batches = Batches(now.images, plan.train, batch_size=size, drop_last=small, **looks)
    if plan.extra is None:
        return batches
    return MixedBatches(batches, Batches(plan.extra, None, batch_size=now.batch_size // 2, drop_last=True, **looks))


@dataclass(frozen=True, slots=True)
class Job:
    """A training to be done, or continued, into a run directory."""

    plan: Plan
    directory: RunDirectory
    resume: bool


def fit(jobs: Sequence[Job], progress: Progress, loggers: Sequence[Logger] = ()) -> list[Outcome]:
    """Train side by side: a step of each in turn, every one with random numbers of its own.

    On a GPU each has a stream of its own, so that runs which do not fill it share it. What comes out is what each would
    have come to alone. If one diverges, the others go on; the first to have failed is told at the end. Epochs are told
    between turns, so that whoever listens cannot touch a run's random numbers.
    """
    cuda = list({job.plan.device for job in jobs if job.plan.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda), Loggers(loggers) as log:
        trainings = [_Training(job.plan, job.directory, progress) for job in jobs]
        turns = [_Turn(training, alone=len(jobs) == 1) for training in trainings]
        for turn, job in zip(turns, jobs, strict=True):
            with turn:
                turn.training.prepare(resume=job.resume)
        announce([job.plan for job in jobs], sum(one.plan.steps(one.epoch) for one in trainings), progress)
        failures, going = [], [(turn, turn.training.run()) for turn in turns]
        while going:
            for turn, steps in list(going):
                try:
                    with turn:
                        epoch = next(steps)
                    if epoch is not None:
                        progress.epoch(epoch)
                        log.epoch(epoch)
                except (StopIteration, Diverged) as end:
                    going.remove((turn, steps))
                    turn.training.engine.reset()
                    failures += [end] if isinstance(end, Diverged) else []
        if failures:
            raise failures[0]
        progress.finish()
    return [training.outcome() for training in trainings]


def announce(plans: Sequence[Plan], done: int, progress: Progress) -> None:
    """Say what is to be trained, and how many steps of it are done."""
    title = " + ".join(dict.fromkeys(plan.name for plan in plans))
    progress.start(f"train {title}", sum(plan.steps(plan.epochs) for plan in plans), done)


class _Turn:
    """The surroundings of one training among several: torch's random state, its threads, and a CUDA stream."""

    def __init__(self, training: _Training, *, alone: bool) -> None:
        self.training, self.device = training, training.plan.device
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda and not alone else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        now = training.plan.phases[0]
        image = torch.zeros(1, *now.shape, device=self.device)
        self.threads = fitting_threads(training.engine.model, image, now.batch_size)
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            torch.manual_seed(training.plan.seed)
            self.random = self._states()

    def __enter__(self) -> None:
        self.others = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.set_rng_state(self.random[0])
        if self.random[1] is not None:
            torch.cuda.set_rng_state(self.random[1], self.device)
        self.streaming = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        self.streaming.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.streaming.__exit__(*error)
        self.random = self._states()
        torch.set_num_threads(self.others)

    def _states(self) -> tuple[Tensor, Tensor | None]:
        cuda = self.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if cuda else None


class _Training:
    """The state of a run and its epochs."""

    def __init__(self, plan: Plan, directory: RunDirectory, progress: Progress) -> None:
        self.plan, self.directory, self.progress = plan, directory, progress
        self.data_random = torch.Generator().manual_seed(plan.seed)
        self.attack_random = torch.Generator(plan.device).manual_seed(plan.seed)
        self.phase = 0
        self.batches = make_batches(plan, self.data_random)
        self.engine = make_engine(plan, plan.model.to(plan.device))
        self.controls = plan.policy.start(plan.task).to(plan.device)
        self.epoch = 0
        self.best: tuple[int, float] | None = None
        self.sound = 0.0
        """The best robust accuracy on validation so far, for the guard."""
        self.strength = 1
        """How many times the recipe's number of attack steps it trains with."""
        self.ended: str | None = None
        """Why training ended before its time."""
        self.history: list[Record] = []

    @property
    def last(self) -> Path:
        return self.directory.checkpoints / "last.pt"

    def prepare(self, *, resume: bool) -> None:
        """Begin, or take up what was left."""
        if resume and self.last.exists():
            self.load()
        elif self.plan.team.leads:
            indices = self.plan.validation.tolist()
            write_json(self.directory.validation, {"seed": self.plan.seed, "indices": indices})

    def run(self) -> Iterator[Epoch | None]:
        """Train; stops for a moment after every step, and after every epoch with what it came to."""
        while self.epoch < self.plan.epochs and not self.ended:
            yield from self.run_epoch()
        self.hand_out("last")

    def outcome(self) -> Outcome:
        """How it ended."""
        assert self.best is not None
        return Outcome(
            epochs=self.epoch, best_epoch=self.best[0], best_score=self.best[1], history=self.history, ended=self.ended
        )

    def run_epoch(self) -> Iterator[Epoch | None]:
        began, warmed = time.perf_counter(), self.engine.warmup
        self.enter(phase_of(self.plan.phases, self.epoch))
        self.push(self.epoch + 1)
        used = self.controls
        self.batches.sampling = used.sampling
        self.plan.objective.on_epoch(self.engine.model, self.epoch + 1)
        train, loss, rate = yield from self.train_epoch()
        self.epoch += 1
        average = self.engine.average
        if average is not None:
            # Only an average that judges the trained model itself needs that model's own statistics.
            average.on_epoch(self.engine.model, self.validate(self.engine.model) if average.gated else train)
        val = self.validate(self.engine.result)
        following = self.plan.policy.on_epoch_end(train, val, self.epoch)
        if following is not None:
            self.controls = following.to(self.plan.device)
        value = score(self.plan.select, val)
        best = self.best is None or value > self.best[1] or self.plan.select == "last"
        self.history.append(
            {
                "epoch": self.epoch,
                "phase": self.phase + 1,
                "lr": rate,
                "loss": loss,
                "train": summary(train),
                "validation": summary(val),
                "controls": controls_record(used),
                "score": value,
                "best": best,
                "seconds": round(time.perf_counter() - began - (warmup := self.engine.warmup - warmed), 3),
                "warmup": round(warmup, 3),
            }
        )
        if best:
            self.best = (self.epoch, value)
            self.hand_out("best")
        self.watch(val)
        if self.plan.team.leads:
            self.save()
            write_history(self.directory.metrics, self.history)
        yield Epoch(
            run=self.directory.path,
            epochs=self.plan.epochs,
            classes=self.plan.task.classes,
            history=tuple(self.history),
        )

    def enter(self, phase: int) -> None:
        """Go on with the images of another phase, if it is another."""
        if phase == self.phase:
            return
        self.phase = phase
        self.batches = make_batches(self.plan, self.data_random, phase)
        self.engine.reset()

    def push(self, epoch: int) -> None:
        """Perturb the weights from the epoch on that the recipe says."""
        awp = self.plan.awp if self.plan.awp is not None and epoch >= self.plan.awp.begin else None
        if awp is not self.engine.awp:
            self.engine.awp = awp
            self.engine.reset()

    def train_epoch(self) -> Generator[None, None, tuple[ClassStats, float, float]]:
        """One pass over the data: statistics in training mode, mean loss, last learning rate."""
        plan, engine = self.plan, self.engine
        stats = ClassStats.zeros(plan.num_classes, plan.device)
        total = torch.zeros((), dtype=torch.float64, device=plan.device)
        rate = 0.0
        for number, (x, y, _) in enumerate(self.batches):
            rate = plan.optimizer.lr * plan.schedule(self.epoch + number / len(self.batches), plan.epochs)
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            batch, loss = engine.step(x, y, self.controls, self.randomness(number, len(y)))
            stats += batch
            total += loss
            if number % CHECK_EVERY == 0:
                self.check(float(loss))
            self.progress.advance()
            yield
        mean = float(total) / len(self.batches)
        self.check(mean)
        return plan.team.total(stats), mean, rate

    def randomness(self, number: int, count: int) -> Randomness:
        """What drives the attack on a batch; each of several processes draws for the whole, and keeps its share."""
        if self.plan.team.size == 1:
            return self.attack_random
        before, whole = self.batches.standing(number)
        return PartNoise(self.attack_random, torch.arange(before, before + count, device=self.plan.device), whole)

    def watch(self, val: ClassStats) -> None:
        """End, or go back, where the recipe says so."""
        plan = self.plan
        assert self.best is not None
        if plan.patience is not None and self.epoch - self.best[0] >= plan.patience:
            self.ended = f"no better epoch in {plan.patience}"
        if plan.guard is None:
            return
        if not plan.guard.collapsed(val, self.sound):
            if robust_share(val) > self.sound:
                self.sound = robust_share(val)
                if plan.guard.action == "back" and plan.team.leads:
                    save_state(self.directory.checkpoints / "sound.pt", self.learned())
            return
        fell = f"catastrophic overfitting in epoch {self.epoch}: robust accuracy fell from {100 * self.sound:.1f}"
        if plan.guard.action == "stop" or self.strength >= STRONGEST:
            self.ended = fell
        else:
            self.relearn(load_state(self.directory.checkpoints / "sound.pt"))
            self.strengthen(2)
        if not plan.team.leads:
            return
        then = "training stops" if self.ended else f"back to the best, with {self.strength} times as many steps"
        warnings.warn(f"{fell} to {100 * robust_share(val):.1f}; {then}", stacklevel=2)

    def strengthen(self, times: int) -> None:
        """Give the training attack so many times its steps."""
        self.strength *= times
        objective: Any = self.engine.objective
        attack = replace(objective.attack, steps=times * objective.attack.steps, step_size=None)
        self.engine.objective = replace(objective, attack=attack)
        self.engine.reset()

    def check(self, loss: float) -> None:
        """Stop a run that has gone wrong before it overwrites the last good checkpoint."""
        first = self.history[0]["loss"] if self.history else float("inf")
        if loss <= BLOW_UP * max(first, 1.0):
            return
        good = (
            f"the last good checkpoint is {self.last} (epoch {self.epoch})" if self.epoch else "no epoch was finished"
        )
        raise Diverged(f"training diverged in epoch {self.epoch + 1} (loss {loss:.4g}); {good}")

    def validate(self, model: nn.Module) -> ClassStats:
        """Statistics of a model on the validation split, with the same noise in every epoch.

        Losses are the objective's own, as the policies need them; accuracy under attack is the judge's, in float32.
        """
        plan, phase, searched = self.plan, self.plan.phases[self.phase], self.engine.searched(model)
        stats = ClassStats.zeros(plan.num_classes, plan.device)
        mine = plan.validation[share_of(len(plan.validation), plan.team.share)]
        even = ClassControls.uniform(plan.num_classes).to(plan.device)
        with torch.no_grad(), frozen(model), frozen(searched):
            for x, y, index in ordered(phase.images, mine, phase.batch_size, plan.device, size=phase.size):
                terms = self.engine.objective(searched, x, y, even, generator=ExampleNoise(plan.seed, index))
                x_adv = plan.judge(searched, x, y, generator=ExampleNoise(plan.seed + 1, index))
                logits_nat, logits_adv = logits_of(model(x)), logits_of(model(x_adv))
                judged = replace(terms, logits_nat=logits_nat, logits_adv=logits_adv)
                stats += ClassStats.of(judged, y, plan.num_classes)
        return plan.team.total(stats)

    def hand_out(self, name: str) -> None:
        """Write the weights down as those of this epoch, for others to use."""
        if self.plan.team.leads:
            save_weights(self.directory.checkpoints / f"{name}.safetensors", self.engine.result)

    def learned(self) -> dict[str, Any]:
        """What training changes from epoch to epoch."""
        engine = self.engine
        return {
            "model": engine.model.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "average": None if engine.average is None else engine.average.state_dict(),
            "policy": self.plan.policy.state_dict(),
            "controls": {name: getattr(self.controls, name) for name in ClassControls.__slots__},
        }

    def relearn(self, state: dict[str, Any]) -> None:
        """Be as some epoch left it."""
        engine = self.engine
        engine.model.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        if engine.average is not None:
            engine.average.load_state_dict(state["average"])
        self.plan.policy.load_state_dict(state["policy"])
        self.controls = ClassControls(**state["controls"]).to(self.plan.device)

    def save(self) -> None:
        state: dict[str, Any] = {
            **self.learned(),
            "epoch": self.epoch,
            "best": self.best,
            "guard": {"sound": self.sound, "strength": self.strength, "ended": self.ended},
            "history": self.history,
            "random": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.plan.device) if self.plan.device.type == "cuda" else None,
                "data": self.data_random.get_state(),
                "attack": self.attack_random.get_state(),
            },
        }
        save_state(self.last, state)

    def load(self) -> None:
        state = load_state(self.last)
        try:
            self.take_up(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{self.last} does not fit this run: {one_line(error, 120)}") from error

    def take_up(self, state: dict[str, Any]) -> None:
        self.epoch, self.best, self.history = state["epoch"], state["best"], state["history"]
        self.sound, self.ended = state["guard"]["sound"], state["guard"]["ended"]
        if state["guard"]["strength"] > 1:
            self.strengthen(state["guard"]["strength"])
        self.relearn(state)
        torch.set_rng_state(state["random"]["torch"])
        if self.plan.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.plan.device)
        self.data_random.set_state(state["random"]["data"])
        self.attack_random.set_state(state["random"]["attack"])
        if self.plan.team.leads:
            write_history(self.directory.metrics, self.history)
