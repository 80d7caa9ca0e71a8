"""Benchmark of training steps against the style of published code, on the same batches from the same weights.

Data loading is not measured: the batches are on the device. Both implementations train on them in the same order in
every round, with the same random starts of the attacks, and continue from round to round, so their mean losses must
agree.
"""

# B batch, K classes

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain, islice, repeat
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Clock, check_rounds, compete, spread
from benchmarks.reference_style import LOSSES, Inner, Loss
from benchmarks.result import OURS, Bench, circumstances, interval, memory, protocol, seconds, table, times
from classwise.attacks import PGD
from classwise.core.errors import InputError
from classwise.core.model_calls import exact
from classwise.core.progress import SILENT, Progress
from classwise.core.types import ClassStats
from classwise.training.plan import Plan, make_batches, make_engine

REFERENCE = "reference style"
TF32 = f"{REFERENCE}, TF32"
"""The same with TF32 products, the default of PyTorch for convolutions on a GPU."""
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
) -> Bench:
    """Time training steps of a plan; with ``peers`` also those of the reference style of its ``objective``."""
    check_rounds(rounds)
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
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
        notes.append("our steps include the weight average of the recipe; the reference style has none")
    losses: dict[str, list[float]] = {name: [] for name in runs}

    def round_of(name: str, run: Run) -> Callable[[], None]:
        return lambda: losses[name].append(run())

    measured, _ = compete(
        {name: round_of(name, run) for name, run in runs.items()},
        rounds,
        device=plan.device,
        check=lambda found: found,
        clock=clock,
        task=f"bench train {plan.name}",
        progress=progress,
    )
    step = {name: spread([value / steps for value in one.seconds]) for name, one in measured.items()}
    done = len(step[OURS]["values"])
    mean = {name: fmean(values[: 1 + done]) for name, values in losses.items()}
    content = {
        **circumstances("train", plan.device, done, done < rounds, notes),
        "recipe": plan.name,
        "overrides": dict(overrides),
        "steps": steps,
        "batch_size": plan.batch_size,
        "attack_steps": getattr(plan.objective.attack, "steps", None),
        "steps_per_epoch": len(batches),
        "entries": [
            {
                "name": name,
                "step": step[name],
                "epoch": step[name]["median"] * len(batches),
                "ratio": step[name]["median"] / step[OURS]["median"],
                "warm_up": one.warm_up,
                "peak_bytes": one.peak_bytes,
                "loss": mean[name] if math.isfinite(mean[name]) else None,
            }
            for name, one in measured.items()
        ],
    }
    return present(content)


def present(content: dict[str, Any]) -> Bench:
    """Return the table and bars of a benchmark of training steps."""
    attack = "no attack" if content["attack_steps"] is None else f"{content['attack_steps']} attack steps"
    foot = f"\\* extrapolated: the median step times {content['steps_per_epoch']}, without validation"
    text = table(
        f"training {content['recipe']}",
        f"{content['steps']} training steps a round, batches of {content['batch_size']}, {attack}; {protocol(content)}",
        ["", "s a step", "min–max", "× ours", "s an epoch*", "peak memory", "mean loss", "warm-up, s"],
        [
            [
                entry["name"],
                seconds(entry["step"]["median"]),
                interval(entry["step"]),
                times(entry["ratio"]),
                seconds(entry["epoch"]),
                memory(entry["peak_bytes"]),
                "diverged" if entry["loss"] is None else f"{entry['loss']:.4f}",
                seconds(entry["warm_up"]),
            ]
            for entry in content["entries"]
        ],
    )
    bars = {entry["name"]: {**entry["step"], "ratio": entry["ratio"]} for entry in content["entries"]}
    title = f"{content['recipe']}, one training step of {content['batch_size']} images"
    return Bench(content=content, tables=[f"{text}\n\n{foot}"], bars={title: bars})


def ours(plan: Plan, batches: list[Batch]) -> Run:
    """Return our engine as configured by the training loop, with the class statistics that the loop accumulates."""
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
    """Return the same training in the style of published code, in exact float32 or with the defaults of PyTorch."""
    if objective not in LOSSES:
        raise InputError(f"it has {' and '.join(LOSSES)}, not {objective}")
    loss_of: Loss = LOSSES[objective]
    inner, beta = _inner(plan), plan.objective.beta
    model = _fresh(plan)
    optimizer = plan.optimizer.build(model.parameters())

    def run() -> float:
        total = torch.zeros((), device=plan.device)
        devices = [plan.device] if plan.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), exact(plan.device) if exactly else nullcontext():
            torch.manual_seed(plan.seed)  # the global state draws the same numbers as a generator of this seed
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
    """Return a copy of the model of the plan."""
    return copy.deepcopy(plan.model).to(plan.device)
