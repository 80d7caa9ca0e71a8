"""What each trick brings: the attack ``fast`` and a training step of TRADES, with one trick at a time switched off.

    python benchmarks/ablation.py evaluate --weights trades.safetensors
    python benchmarks/ablation.py evaluate --model benchmarks/models.py:cifar10_tiny_cnn --eps 4/255 --per-class 400
    python benchmarks/ablation.py train --batch-size 128

Variants of an evaluation run in turn, several rounds of them in one process, of which the first is their warm-up; shown
are medians with the smallest and the largest. Beside the seconds stands what the variant left of the images, as a trick
may cost strength. Training steps run on random images: only time is looked at. Each of their variants has a process of
its own, because cuDNN remembers its choice of kernels as long as a process lives.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

import classwise as cw
from classwise.accelerate import folding, graphs, twin
from classwise.attacks import CosinePGD, gradient, square
from classwise.config.recipes import load_recipe
from classwise.core.model_calls import OptimizedCopy
from classwise.data import load_data
from classwise.models.load import load_model
from classwise.training import compiled, views
from classwise.training.loop import make_engine
from classwise.training.plan import make_plan

Switch = Callable[[], Any]
"""Makes a context in which a trick is off."""


def changed(place: Any, name: str, value: Any) -> Switch:
    """A trick that is off where a name has another value."""
    return lambda: mock.patch.object(place, name, value)


@contextmanager
def float32_body() -> Iterator[None]:
    """The twin without bfloat16."""
    plain = twin.twin_of
    with mock.patch.object(twin, "twin_of", lambda model, x, **_: plain(model, x, lowered=False)):
        yield


def never(layer: Any) -> bool:
    """No layer is of that kind."""
    return False


@dataclass(frozen=True)
class Variant:
    """What is switched off, and how."""

    name: str
    switches: tuple[Switch, ...] = ()
    engine: str = "auto"


EVALUATION = (
    Variant("everything on"),
    Variant("no twin: the model in eager float32 (TF32)", engine="eager"),
    Variant("no bfloat16", (float32_body,)),
    Variant("no folding", (changed(twin, "_WAYS", ("as it is",)),)),
    Variant("no fused kernels", (changed(twin, "_WAYS", ("folded", "as it is")),)),
    Variant("first layer in float32, not in two halves", (changed(twin, "fits", never),)),
    Variant("no channels last", (changed(torch, "channels_last", torch.contiguous_format),)),
    Variant("no CUDA graphs", (changed(graphs, "LARGEST", 0), changed(twin, "LARGEST", 0))),
    Variant(
        "CUDA graphs of passes, not of whole steps", (changed(twin.Twin, "repeat_steps", OptimizedCopy.repeat_steps),)
    ),
    Variant("no targets side by side", (changed(gradient, "CAPACITY", {False: 1, True: 1}),)),
    Variant("Square does not run ahead", (changed(square, "CAPACITY", {False: 0, True: 0}),)),
    Variant("targets by their logits", (changed(CosinePGD, "target_order", gradient.GradientAttack.target_order),)),
)


def evaluation(model: str, weights: str | None, eps: str, per_class: int | None, rounds: int, only: list[str]) -> None:
    """The attack ``fast`` on CIFAR-10, all variants in turn, and that several times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attacked, data = load_model(model, weights=weights).eval().to(device), load_data("cifar10", split="test")
    variants = chosen(EVALUATION, only)
    reports: dict[str, list[tuple[float, cw.ClassReport]]] = {variant.name: [] for variant in variants}
    for variant in variants * (1 + rounds):
        with ExitStack() as stack:
            for switch in variant.switches:
                stack.enter_context(switch())
            began = time.perf_counter()
            report = cw.evaluate(attacked, data, attacks=["fast"], eps=eps, engine=variant.engine, per_class=per_class)
            reports[variant.name].append((time.perf_counter() - began, report))
            print(f"{variant.name}: {report.attacks['fast'].seconds:.2f} s", file=sys.stderr, flush=True)
    row("variant", "attack, s", "whole call, s", "passes an image", "left, %", "worst, %", "broken by the audit")
    for name, (_, *counted) in reports.items():
        result, info = counted[0][1]["fast"], counted[0][1].attacks["fast"]
        assert info.audit is not None
        row(
            name,
            spread([one.attacks["fast"].seconds for _, one in counted]),
            spread([seconds for seconds, _ in counted]),
            f"{(info.forwards + 2 * info.backwards) / result.overall.n:.0f}",
            f"{result.overall.value:.2f}",
            f"{result.worst.value:.1f}" if result.worst else "-",
            f"{info.audit.broke} + {info.audit.broke_random}",
        )


def spread(values: list[float]) -> str:
    """The median, and from which to which."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that compiles nothing."""
    return function


TRAINING = (
    Variant("everything on"),
    Variant("no torch.compile", (changed(compiled, "compiled", as_it_is),)),
    Variant("two passes instead of a pair", (changed(compiled.Stand, "both", None),)),
    Variant("no folding in the attack", (changed(twin, "_WAYS", ("as it is",)),)),
    Variant("no fused kernels in the attack", (changed(twin, "_WAYS", ("folded", "as it is")),)),
    Variant("shortcuts with their stride", (changed(folding, "thins", never), changed(views, "thins", never))),
    Variant("first layer in float32, not in two halves", (changed(twin, "fits", never), changed(views, "fits", never))),
    Variant("kernels by cuDNN's guess", (changed(compiled, "kernels_by_trial", nullcontext),)),
    Variant("logits by cuBLAS", (changed(twin, "FEW", 0),)),
    Variant("no fused losses and steps", (changed(compiled, "fusing", nullcontext),)),
    Variant("float32", engine="fp32"),
    Variant("no CUDA graph, no twin: eager bf16", engine="eager-bf16"),
    Variant("eager float32 (TF32)", engine="eager"),
)


def training(batch_size: int, steps: int, model: str, only: list[str]) -> None:
    """Steps of TRADES with PGD-10 on images of CIFAR-10's size."""
    row("variant", "ms a step", "s for 50,000 images", "warm-up, s")
    for variant in chosen(TRAINING, only):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            each, warmup = alone.submit(step_time, variant.name, batch_size, steps, model).result()
        row(variant.name, f"{1e3 * each:.2f}", f"{each * -(-50_000 // batch_size):.2f}", f"{warmup:.0f}")


def step_time(name: str, batch_size: int, steps: int, model: str) -> tuple[float, float]:
    """Seconds that a step takes in one variant, and its warm-up."""
    (variant,) = (variant for variant in TRAINING if variant.name == name)
    changes = {"fp32": {"precision": "fp32"}, "eager": {"engine": "eager"}}.get(variant.engine, {})
    if variant.engine == "eager-bf16":
        changes = {"engine": "eager", "precision": "bf16"}
    settings = {"data": f"{__file__}:noise", "batch_size": batch_size, "validation_per_class": 10, "model": model}
    plan = make_plan(load_recipe("cifar10/trades", {**settings, **changes}), torch.device("cuda"))
    x = torch.rand(batch_size, 3, 32, 32, device="cuda")
    y = torch.randint(10, (batch_size,), device="cuda")
    controls = plan.policy.start(plan.task).to(x.device)
    random = torch.Generator("cuda").manual_seed(0)
    with ExitStack() as stack:
        for switch in variant.switches:
            stack.enter_context(switch())
        engine = make_engine(plan, plan.model.to("cuda"))
        for count in (2, steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                engine.step(x, y, controls, random)
            torch.cuda.synchronize()
            each = (time.perf_counter() - began) / count
    return each, engine.warmup


def chosen(variants: tuple[Variant, ...], only: list[str]) -> list[Variant]:
    """Those whose names hold one of some words; all without any."""
    return [variant for variant in variants if not only or any(word in variant.name for word in only)]


def noise(split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Images without meaning."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (1000, 3, 32, 32), dtype=np.uint8), np.arange(1000) % 10


def row(*cells: str) -> None:
    """One line of a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Read what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["evaluate", "train"])
    parser.add_argument("--weights")
    parser.add_argument("--eps", default="8/255", help="of an evaluation")
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="of an evaluation, after one to warm up")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of variants")
    asked = parser.parse_args()
    if asked.what == "evaluate":
        evaluation(asked.model, asked.weights, asked.eps, asked.per_class, asked.rounds, asked.only)
    else:
        training(asked.batch_size, asked.steps, asked.model, asked.only)


if __name__ == "__main__":
    main()
