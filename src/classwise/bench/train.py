"""Training steps side by side: our engine and the style of published code, on the same batches from the same weights.

Neither side's data pipeline is measured: the batches lie ready on the device. Both go through them in the same order
in every round, with the same random starts of the attacks, and go on training from round to round; the mean loss then
tells whether they do the same work.
"""

# B batch, K classes

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.bench.reference_style import LOSSES, Inner, Loss
from classwise.bench.result import OURS, TrainingBench, TrainingEntry
from classwise.bench.rounds import Clock, Timed, check_rounds, clock_of, interleave, spread, timed
from classwise.bench.watch import Peak, peak_memory
from classwise.core.errors import InputError
from classwise.core.model_calls import exact
from classwise.core.progress import SILENT, Progress
from classwise.core.types import ClassStats
from classwise.storage.run_directory import hardware, versions
from classwise.training.loop import Plan, make_batches, make_engine

REFERENCE = "reference style"
TF32 = f"{REFERENCE}, TF32"
"""The same where products keep ten bits, as a GPU does by default; what is called float32 keeps them all."""
Batch = tuple[Tensor, Tensor]
Run = Callable[[], float]
"""One round of training steps; returns the mean loss."""


def bench_training(
    plan: Plan,
    *,
    objective: str,
    overrides: Mapping[str, Any],
    steps: int = 10,
    rounds: int = 5,
    peers: bool = False,
    clock: Clock | None = None,
    progress: Progress = SILENT,
) -> TrainingBench:
    """Time training steps by a plan; with ``peers`` beside the reference style of its ``objective``."""
    check_rounds(rounds)
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    clock = clock or clock_of(plan.device)
    batches = make_batches(plan, torch.Generator().manual_seed(plan.seed))
    ready = [(x, y) for x, y, _ in islice(chain.from_iterable(repeat(batches)), steps)]
    runs, notes = {OURS: ours(plan, ready)}, []
    if peers:
        try:
            runs[REFERENCE] = reference(plan, objective, ready, exactly=True)
            if plan.device.type == "cuda":
                runs[TF32] = reference(plan, objective, ready, exactly=False)
        except InputError as error:
            notes.append(f"{REFERENCE} is left out: {error}")
    if plan.ema and REFERENCE in runs:
        notes.append("our steps keep the weight average that the recipe asks for; the reference style has none")
    progress.start(f"bench train {plan.name}", len(runs) * (rounds + 1))
    try:
        watched = partial(_watched, clock, plan.device)
        warm_up = {name: found[0] for name, found in interleave(runs, 1, watched, progress).items()}
        found = interleave(runs, rounds, partial(timed, clock), progress)
    finally:
        progress.finish()
    step = {name: spread([one.seconds / steps for one in several]) for name, several in found.items()}
    return TrainingBench(
        device=str(plan.device),
        hardware=hardware(),
        versions=versions(),
        rounds=len(found[OURS]),
        interrupted=len(found[OURS]) < rounds,
        notes=notes,
        recipe=plan.name,
        overrides=dict(overrides),
        steps=steps,
        batch_size=plan.batch_size,
        attack_steps=getattr(plan.objective.attack, "steps", None),
        steps_per_epoch=len(batches),
        entries=[
            TrainingEntry(
                name=name,
                step=step[name],
                epoch=step[name].median * len(batches),
                ratio=step[name].median / step[OURS].median,
                warm_up=warm_up[name].timed.seconds,
                peak_bytes=warm_up[name].peak.bytes,
                loss=mean if math.isfinite(mean) else None,
            )
            for name in runs
            for mean in [fmean([warm_up[name].timed.result, *(one.result for one in found[name])])]
        ],
    )


@dataclass(frozen=True, slots=True)
class _Watched:
    timed: Timed[float]
    peak: Peak


def _watched(clock: Clock, device: torch.device, run: Run) -> _Watched:
    with peak_memory(device) as peak:
        found = timed(clock, run)
    return _Watched(found, peak)


def ours(plan: Plan, batches: list[Batch]) -> Run:
    """The engine as the training loop sets it up, and the class statistics that the loop keeps."""
    engine = make_engine(plan, _fresh(plan))
    controls = plan.policy.start(plan.task).to(plan.device)
    random = torch.Generator(plan.device)

    def run() -> float:
        stats = ClassStats.zeros(plan.num_classes, plan.device)
        random.manual_seed(plan.seed)
        total = torch.zeros((), device=plan.device)
        for x, y in batches:
            batch, loss = engine.step(x, y, controls, random)
            stats += batch
            total += loss
        return float(total) / len(batches)

    return run


def reference(plan: Plan, objective: str, batches: list[Batch], *, exactly: bool) -> Run:
    """The same training in the style of published code, in float32 or in what passes for it by default."""
    if objective not in LOSSES:
        raise InputError(f"it knows {' and '.join(LOSSES)}, not {objective}")
    loss_of: Loss = LOSSES[objective]
    inner, beta = _inner(plan), plan.objective.beta
    model = _fresh(plan)
    optimizer = plan.optimizer.build(model.parameters())

    def run() -> float:
        total = torch.zeros((), device=plan.device)
        devices = [plan.device] if plan.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), exact(plan.device) if exactly else nullcontext():
            torch.manual_seed(plan.seed)  # what a generator of this seed draws, the global state draws too
            for x, y in batches:
                loss = loss_of(model, x, y, inner, beta)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                if plan.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
                optimizer.step()
                total += loss.detach()
        return float(total) / len(batches)

    return run


def _inner(plan: Plan) -> Inner:
    attack = plan.objective.attack
    if not isinstance(attack, PGD) or attack.threat.norm != "Linf":
        raise InputError("it attacks by PGD in the Linf ball")
    eps = attack.threat.eps
    return Inner(
        eps=eps,
        step_size=attack.step_size if attack.step_size is not None else 2.5 * eps / attack.steps,
        steps=attack.steps,
        start=attack.start,
    )


def _fresh(plan: Plan) -> nn.Module:
    """A model of its own, with the plan's weights."""
    return copy.deepcopy(plan.model).to(plan.device)
