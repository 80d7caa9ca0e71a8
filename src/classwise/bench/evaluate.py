"""Attacks side by side: ours and the same attack by others, on the same model, images, start and budget."""

# B batch, K classes, N images

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import searcher
from classwise.attacks.adapters.call import untouched
from classwise.bench.peers import AnyAttack, Asked, Peer, peers_of
from classwise.bench.result import OURS, AttackCase, AttackEntry, EvaluationBench, Spread
from classwise.bench.rounds import Clock, check_rounds, clock_of, interleave, spread, timed
from classwise.bench.watch import Passes, Peak, counting, peak_memory
from classwise.core.choices import EngineName
from classwise.core.errors import InputError, one_line
from classwise.core.model_calls import blamed_on_the_model, device_of, dtype_of, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.inputs import count_classes, default_batch_size
from classwise.evaluation.judge import predict
from classwise.evaluation.perturbations import Perturbations
from classwise.evaluation.record import Record
from classwise.evaluation.stages import AttackParts, Run, predict_natural, run_attack
from classwise.evaluation.trust.checks import run_probes
from classwise.reporting.estimates import Estimate, estimate
from classwise.reporting.report import ThreatInfo
from classwise.storage.run_directory import hardware, versions
from classwise.storage.verdicts import Verdicts


class Plain(nn.Module):
    """A model as any library takes it: answers are plain logits in the type of the images.

    A module of its own, so that hooks on it are met: one library takes a Sequential apart.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype_of(model)

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x.to(self.dtype))).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How many images survive, and how many results lay outside the ball and were thrown away."""

    robust: int
    rejected: int


Found = Tensor | Judged
"""Attacked images, in the order of those given; or what the evaluation has judged already."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody who attacks all the images when called."""

    name: str
    version: str | None
    modules: tuple[nn.Module, ...]
    """Through which it asks the model."""
    run: Callable[[], Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """What the warm-up round tells of a contender."""

    seconds: float
    passes: Passes
    peak: Peak
    judged: Judged


@dataclass(kw_only=True)
class Arena:
    """The model and the images that everybody works on, and the one check of what they find."""

    model: nn.Module
    images: ImageSet
    index: Tensor
    """(N,) which of these take part."""
    x: Tensor
    y: Tensor
    threat: Threat
    num_classes: int
    batch_size: int
    seed: int
    engine: EngineName = "auto"
    clock: Clock
    natural: Tensor = field(init=False)
    """(N,) bool: right when untouched."""

    def __post_init__(self) -> None:
        self.natural = self.right(self.x)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def right(self, x: Tensor) -> Tensor:
        """(N,) bool: which images get their label, in plain float32."""
        labels = [predict(self.model, batch) for batch in torch.split(x, self.batch_size)]
        return torch.from_numpy(np.concatenate(labels)).to(self.device) == self.y

    def judge(self, found: Found) -> Judged:
        """What became of the images; a result outside the ball leaves its image as it was."""
        if isinstance(found, Judged):
            return found
        if found.shape != self.x.shape:
            raise InputError(f"returned {tuple(found.shape)}; expected images of shape {tuple(self.x.shape)}")
        found = found.to(self.x)
        inside = self.threat.ball(self.x).contains(found)
        right = self.right(torch.where(inside[:, None, None, None], found, self.x))
        return Judged(robust=int((self.natural & right).sum()), rejected=int((~inside).sum()))

    def ours(self, attack: AnyAttack) -> Contender:
        """Our own attack."""
        searched = searcher(self.model, self.x, self.engine) if attack.uses_optimized_copy else self.model
        parts = AttackParts.of(OURS, OURS, attack, self.num_classes)
        return Contender(
            name=OURS,
            version=versions()["classwise"],
            modules=tuple(dict.fromkeys((searched, self.model))),
            run=partial(evaluate_all, parts, searched, self)
            if parts.stages or parts.variants
            else partial(attack_all, attack, searched, self),
        )

    def theirs(self, peer: Peer, asked: Asked) -> Contender:
        """The attack of a peer."""
        return Contender(
            name=peer.name,
            version=peer.version,
            modules=(asked.model,),
            run=partial(peer.search, self.x, self.y),
        )

    def first(self, contender: Contender) -> First:
        """A contender's warm-up run, watched and judged."""
        with peak_memory(self.device) as peak, counting(*contender.modules) as passes:
            warm_up = timed(self.clock, contender.run)
        return First(seconds=warm_up.seconds, passes=passes, peak=peak, judged=self.judge(warm_up.result))

    def tried(self, contender: Contender) -> First | str:
        """The same, or one line where another library fails; if we do, that is an error."""
        if contender.name == OURS:
            with blamed_on_the_model("under attack"):
                return self.first(contender)
        try:
            return self.first(contender)
        except Exception as error:  # a stranger's code may raise anything
            return one_line(error, 120)

    def seconds(self, run: Callable[[], Found]) -> float:
        """What a run takes."""
        with blamed_on_the_model("in a later round, not in the first"):
            return timed(self.clock, run).seconds


def attack_all(attack: AnyAttack, searched: nn.Module, arena: Arena) -> Tensor:
    """A single attack on all images in batches: also on those that the model gets wrong untouched, as others do it."""
    rows = torch.arange(len(arena.x), device=arena.device)
    return torch.cat(
        [
            attack(searched, arena.x[some], arena.y[some], generator=ExampleNoise(arena.seed, arena.index[some]))
            for some in torch.split(rows, arena.batch_size)
        ]
    )


def evaluate_all(parts: AttackParts, searched: nn.Module, arena: Arena) -> Judged:
    """An attack of several parts, by the evaluation itself: it decides which part works on which images.

    The check of each part's results, the same as everybody's, is then part of the work, as it is in the ensembles of
    others.
    """
    index = arena.index.cpu().numpy()
    verdicts = Verdicts.pending(
        index,
        arena.images.labels[index],
        attacks=[OURS, *parts.variants],
        stages=list(parts.stages),
        corrupted=[],
    )
    run = Run(
        model=arena.model,
        searched=searched,
        images=arena.images,
        threat=arena.threat,
        seed=arena.seed,
        record=Record(verdicts=verdicts),
        loop=BatchLoop(size=arena.batch_size, progress=SILENT),
    )
    rows = np.ones(len(index), dtype=bool)
    predict_natural(run, rows)
    warnings: list[str] = []
    if "doubtful" in parts.selects.values():
        warnings = run_probes(run, black_box=not parts.has_audit).warnings
    run_attack(run, parts, rows, warnings)
    return Judged(
        robust=int(verdicts.survived(OURS).sum()),
        rejected=sum(int(effort["rejected"]) for effort in run.record.effort.values()),
    )


def bench_evaluation(
    model: nn.Module,
    images: ImageSet,
    perturbations: Perturbations,
    *,
    name: str,
    count: int = 500,
    batch_size: int | None = None,
    rounds: int = 5,
    peers: bool = False,
    seed: int = 0,
    engine: EngineName = "auto",
    clock: Clock | None = None,
    progress: Progress = SILENT,
) -> EvaluationBench:
    """Measure every attack of a perturbations, with ``peers`` beside the same attack by everybody who is installed.

    ``name`` is what the model is called; ``count`` images are taken evenly from the set.
    """
    check_rounds(rounds)
    if count < 1:
        raise InputError(f"images must be at least 1, got {count}")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if perturbations.corruptions or not perturbations.attacks:
        raise InputError("a bench measures attacks, one or several; corruptions are not among them")
    model.eval()
    device = device_of(model)
    num_classes = count_classes(model, images)
    rows = np.linspace(0, len(images) - 1, min(count, len(images)), dtype=np.int64)
    x, y, index = next(ordered(images, rows, len(rows), device))
    arena = Arena(
        model=model,
        images=images,
        index=index,
        x=x,
        y=y,
        threat=perturbations.threat,
        num_classes=num_classes,
        batch_size=min(batch_size or default_batch_size(images, device), len(rows)),
        seed=seed,
        engine=engine,
        clock=clock or clock_of(device),
    )
    notes: list[str] = []
    cases: list[AttackCase] = []
    interrupted = False
    with untouched(model):
        for key, (spec, attack) in perturbations.attacks.items():
            contenders = [arena.ours(attack)]
            if peers:
                found, left_out = _peers(arena, attack)
                contenders, notes = contenders + found, notes + left_out
            try:
                entries = compete(arena, contenders, rounds, f"bench {key}", progress, notes)
            except KeyboardInterrupt:
                if not cases:
                    raise
                interrupted = True
                break
            cases.append(AttackCase(spec=spec, settings=repr(attack), entries=entries))
            interrupted = len(entries[0].seconds.values) < rounds
            if interrupted:
                break
    return EvaluationBench(
        device=str(device),
        hardware=hardware(),
        versions=versions(),
        rounds=len(cases[-1].entries[0].seconds.values),
        interrupted=interrupted,
        notes=list(dict.fromkeys(notes)),
        model=name,
        data=f"{images.name}/{images.split}",
        images=len(rows),
        batch_size=arena.batch_size,
        threat=ThreatInfo(
            norm=perturbations.threat.norm, eps=perturbations.threat.eps, eps_text=perturbations.threat.text
        ),
        natural=Estimate(**estimate(int(arena.natural.sum()), len(rows))),
        cases=cases,
    )


def _peers(arena: Arena, attack: AnyAttack) -> tuple[list[Contender], list[str]]:
    asked = Asked(
        model=Plain(arena.model).eval(),
        attack=attack,
        threat=arena.threat,
        num_classes=arena.num_classes,
        shape=tuple(arena.x.shape[1:]),
        batch_size=arena.batch_size,
        device=arena.device,
        seed=arena.seed,
    )
    found, left_out = peers_of(asked)
    return [arena.theirs(peer, asked) for peer in found], left_out


def compete(
    arena: Arena, contenders: Sequence[Contender], rounds: int, task: str, progress: Progress, notes: list[str]
) -> list[AttackEntry]:
    """A warm-up round and the rounds that count. The first contender is the measure of the others.

    Who fails in the warm-up round is left out, with a line in ``notes``.
    """
    progress.start(task, len(contenders) * (rounds + 1))
    try:
        trials = {one.name: partial(arena.tried, one) for one in contenders}
        warm_up = {name: found[0] for name, found in interleave(trials, 1, _call, progress).items()}
        notes += [f"{name} is left out: {found}" for name, found in warm_up.items() if isinstance(found, str)]
        able = {one.name: one for one in contenders if isinstance(warm_up[one.name], First)}
        times = interleave({name: one.run for name, one in able.items()}, rounds, arena.seconds, progress)
    finally:
        progress.finish()
    spreads = {name: spread(values) for name, values in times.items()}
    measure = spreads[contenders[0].name].median
    return [
        _entry(able[name], found, spreads[name], measure, len(arena.x))
        for name, found in warm_up.items()
        if isinstance(found, First)
    ]


def _call(run: Callable[[], First | str]) -> First | str:
    return run()


def _entry(contender: Contender, first: First, seconds: Spread, measure: float, n: int) -> AttackEntry:
    return AttackEntry(
        name=contender.name,
        version=contender.version,
        seconds=seconds,
        ratio=seconds.median / measure,
        warm_up=first.seconds,
        forwards=first.passes.forwards,
        backwards=first.passes.backwards,
        peak_bytes=first.peak.bytes,
        robust=Estimate(**estimate(first.judged.robust, n)),
        rejected=first.judged.rejected,
    )
