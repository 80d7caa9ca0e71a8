"""Benchmark of attacks against the same attacks of other libraries, with equal model, images, start and budget.

Every contender attacks all images, including those that the model misclassifies, and all results are checked in the
same way. Our ensembles (attacks with stages or variants) run as a whole call of ``classwise.evaluate``, including the
trust checks; their passes are those of the report.
"""

# B batch, K classes, N images

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import classwise as cw
from benchmarks.measure import Clock, Measured, check_rounds, compete, spread
from benchmarks.peers import Settings, peers_of, version_of
from benchmarks.result import OURS, Bench, circumstances, interval, memory, protocol, seconds, table, times
from classwise.accelerate import search_model
from classwise.attacks import BallAttack
from classwise.attacks.adapters.call import preserve_model
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, exact, logits_of, model_errors
from classwise.core.pass_counter import Passes
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.data import ImageSet, ordered
from classwise.evaluation.perturbations import Perturbations
from classwise.reporting.estimates import estimate
from classwise.storage.run_directory import versions


class Plain(nn.Module):
    """A model that every library accepts: it returns plain logits in the dtype of the images.

    Not a Sequential, because ART would call its layers one by one and bypass the hooks that count passes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype_of(model)

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x.to(self.dtype))).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Numbers of robust images and of results outside the ball; the passes, if an evaluation has counted them."""

    robust: int
    rejected: int
    passes: Passes | None = None


@dataclass(kw_only=True)
class Arena:
    """The model, images and threat that all contenders share, and the check of their results."""

    model: nn.Module
    images: ImageSet
    """The images to attack."""
    index: Tensor
    """(N,) their positions in the data set."""
    x: Tensor
    y: Tensor
    threat: Threat
    batch_size: int
    seed: int = 0
    engine: EngineName = "auto"
    num_classes: int = field(init=False)
    natural: Tensor = field(init=False)
    """(N,) bool: correct without attack."""

    def __post_init__(self) -> None:
        self.plain = Plain(self.model).eval()
        with model_errors("on natural images"):
            self.natural = self.correct(self.x)

    def correct(self, x: Tensor) -> Tensor:
        """Return whether each image is classified correctly, (N,) bool, in float32."""
        with torch.no_grad(), exact(x.device):
            logits = torch.cat([self.plain(batch) for batch in torch.split(x, self.batch_size)])
        self.num_classes = logits.shape[1]
        return logits.argmax(1) == self.y

    def judge(self, found: Tensor | Judged) -> Judged:
        """Check the attacked images. An image outside the ball is replaced by its original."""
        if isinstance(found, Judged):
            return found
        if found.shape != self.x.shape:
            raise InputError(f"returned {tuple(found.shape)}; expected images of shape {tuple(self.x.shape)}")
        found = found.to(self.x)
        inside = self.threat.ball(self.x).contains(found)
        correct = self.correct(torch.where(inside[:, None, None, None], found, self.x))
        return Judged(robust=int((self.natural & correct).sum()), rejected=int((~inside).sum()))

    def ours(self, attack: Any) -> tuple[Callable[[], Tensor | Judged], list[nn.Module]]:
        """Return a function that runs our attack on all images, and the modules through which it calls the model."""
        if attack.variants() or attack.stages(self.num_classes):
            return partial(self._evaluated, attack), []
        searched = search_model(self.model, self.x, self.engine) if isinstance(attack, BallAttack) else self.model
        return partial(self._attacked, attack, searched), list(dict.fromkeys((searched, self.model)))

    def _attacked(self, attack: Any, searched: nn.Module) -> Tensor:
        batches = torch.split(torch.arange(len(self.x), device=self.x.device), self.batch_size)
        with model_errors("under attack"):
            return torch.cat(
                [
                    attack(searched, self.x[rows], self.y[rows], generator=ExampleNoise(self.seed, self.index[rows]))
                    for rows in batches
                ]
            )

    def _evaluated(self, attack: Any) -> Judged:
        report = cw.evaluate(
            self.model,
            self.images,
            attacks=[attack],
            eps=self.threat.text,
            norm=self.threat.norm,
            batch_size=self.batch_size,
            seed=self.seed,
            engine=self.engine,
        )
        (info,), overall = report.attacks.values(), report[next(iter(report.attacks))].overall
        return Judged(
            robust=round((overall.value or 0) / 100 * overall.n),
            rejected=info.rejected,
            passes=Passes(forwards=info.forwards, backwards=info.backwards),
        )


def bench_evaluation(
    model: nn.Module,
    images: ImageSet,
    suite: Perturbations,
    *,
    name: str,
    count: int = 500,
    batch_size: int = 250,
    rounds: int = 5,
    peers: bool = False,
    seed: int = 0,
    engine: EngineName = "auto",
    clock: Clock | None = None,
    progress: Progress = SILENT,
) -> Bench:
    """Measure every attack of a suite, with ``peers`` also the same attack of every installed library.

    ``name`` is the name of the model; ``count`` evenly spaced images are attacked.
    """
    check_rounds(rounds)
    for what, number in (("images", count), ("batch_size", batch_size)):
        if number < 1:
            raise InputError(f"{what} must be at least 1, got {number}")
    if suite.corruptions or not suite.attacks:
        raise InputError("a benchmark measures one or several attacks; corruptions are not supported")
    model.eval()
    rows = np.linspace(0, len(images) - 1, min(count, len(images)), dtype=np.int64)
    x, y, index = next(ordered(images, rows, len(rows), device_of(model)))
    arena = Arena(
        model=model,
        images=images.take(rows),
        index=index,
        x=x,
        y=y,
        threat=suite.threat,
        batch_size=min(batch_size, len(rows)),
        seed=seed,
        engine=engine,
    )
    notes: list[str] = []
    cases: list[dict[str, Any]] = []
    done = rounds
    with preserve_model(model):
        for key, (spec, attack) in suite.attacks.items():
            try:
                entries, left_out = bench_attack(
                    arena, attack, rounds, peers=peers, clock=clock, task=f"bench {key}", progress=progress
                )
            except KeyboardInterrupt:
                if not cases:
                    raise
                done = 0
                break
            notes += left_out
            cases.append({"spec": spec, "settings": repr(attack), "entries": entries})
            done = len(entries[0]["seconds"]["values"])
            if done < rounds:
                break
    content = {
        **circumstances("evaluate", x.device, len(cases[-1]["entries"][0]["seconds"]["values"]), done < rounds, notes),
        "model": name,
        "data": f"{images.name}/{images.split}",
        "images": len(rows),
        "batch_size": arena.batch_size,
        "threat": {"norm": suite.threat.norm, "eps": suite.threat.eps, "eps_text": suite.threat.text},
        "natural": estimate(int(arena.natural.sum()), len(rows)),
        "cases": cases,
    }
    return present(content)


def bench_attack(
    arena: Arena,
    attack: Any,
    rounds: int,
    *,
    peers: bool,
    clock: Clock | None = None,
    task: str = "bench",
    progress: Progress = SILENT,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure one attack of every contender; also return a line for each library that is left out."""
    run, modules = arena.ours(attack)
    runs, watched = {OURS: run}, {OURS: modules}
    left_out: list[str] = []
    if peers:
        settings = Settings(attack=attack, num_classes=arena.num_classes, batch_size=arena.batch_size, seed=arena.seed)
        found, left_out = peers_of(settings)
        runs |= {name: partial(peer, arena.plain, arena.x, arena.y, arena.threat) for name, peer in found.items()}
        watched |= {name: [arena.plain] for name in found}
    measured, failed = compete(
        runs,
        rounds,
        device=arena.x.device,
        check=arena.judge,
        modules=watched,
        optional=set(runs) - {OURS},
        clock=clock,
        task=task,
        progress=progress,
    )
    return entries_of(measured, len(arena.x)), left_out + failed


def entries_of(measured: dict[str, Measured[Judged]], n: int) -> list[dict[str, Any]]:
    """Return the measurements of contenders for ``bench.json``; ratios are relative to the first."""
    ours = spread(next(iter(measured.values())).seconds)["median"]
    return [
        {
            "name": name,
            "version": versions()["classwise"] if name == OURS else version_of(name),
            "seconds": (found := spread(one.seconds)),
            "ratio": found["median"] / ours,
            "warm_up": one.warm_up,
            "forwards": (passes := one.result.passes or one.passes).forwards,
            "backwards": passes.backwards,
            "peak_bytes": one.peak_bytes,
            "robust": estimate(one.result.robust, n),
            "rejected": one.result.rejected,
        }
        for name, one in measured.items()
    ]


def present(content: dict[str, Any]) -> Bench:
    """Return the tables and bars of a benchmark of attacks."""
    threat = f"{content['threat']['norm']} eps = {content['threat']['eps_text']}"
    about = (
        f"{content['model']}, {content['images']} images of {content['data']} in batches of {content['batch_size']}, "
        f"{threat}; natural accuracy {_percent(content['natural'])}; {protocol(content)}"
    )
    columns = ["", "seconds", "min–max", "× ours", "forwards", "backwards", "peak memory", "robust, % [95%]"]
    return Bench(
        content=content,
        tables=[
            table(case["spec"], about, [*columns, "outside", "warm-up, s"], map(_cells, case["entries"]))
            for case in content["cases"]
        ],
        bars={
            f"{case['spec']}, {content['images']} images of {content['data']}": {
                entry["name"]: {**entry["seconds"], "ratio": entry["ratio"]} for entry in case["entries"]
            }
            for case in content["cases"]
        },
    )


def _cells(entry: dict[str, Any]) -> list[str]:
    return [
        entry["name"],
        seconds(entry["seconds"]["median"]),
        interval(entry["seconds"]),
        times(entry["ratio"]),
        f"{entry['forwards']:,}",
        f"{entry['backwards']:,}",
        memory(entry["peak_bytes"]),
        _percent(entry["robust"]),
        f"{entry['rejected']:,}",
        seconds(entry["warm_up"]),
    ]


def _percent(found: dict[str, Any]) -> str:
    return f"{found['value']:.1f} [{found['low']:.1f}, {found['high']:.1f}]"
