"""Ablation: the attack ``fast`` and a training step of TRADES, with one optimization at a time switched off.

    python -m benchmarks.ablation evaluate --weights trades.safetensors
    python -m benchmarks.ablation evaluate --model benchmarks/models.py:cifar10_tiny_cnn --eps 4/255 --per-class 400
    python -m benchmarks.ablation train --batch-size 128

Variants of an evaluation run interleaved in one process, with one warm-up round; the table shows the median (min-max)
and the robust accuracy, because an optimization may weaken the attack. Training steps run on random images, so only
their time counts. Each training variant runs in its own process, because cuDNN keeps its choice of kernels for the
lifetime of a process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import torch

import classwise as cw
from benchmarks.measure import interleave, spread
from benchmarks.result import row
from classwise.accelerate import cuda_graphs, folding, optimized_copy
from classwise.attacks import CosinePGD, gradient, square
from classwise.config.recipes import load_recipe
from classwise.core.model_calls import OptimizedCopy
from classwise.data import load_data
from classwise.models.load import load_model
from classwise.training import compiled, model_views
from classwise.training.plan import make_engine, make_plan

Switch = Callable[[], Any]
"""Returns a context in which an optimization is off."""


def changed(place: Any, name: str, value: Any) -> Switch:
    """Return a switch that turns an optimization off by replacing an attribute."""
    return lambda: mock.patch.object(place, name, value)


@contextmanager
def float32_body() -> Iterator[None]:
    """Build the optimized copy without bfloat16."""
    plain = optimized_copy.make_optimized_copy
    with mock.patch.object(optimized_copy, "make_optimized_copy", lambda model, x, **_: plain(model, x, lowered=False)):
        yield


def never(layer: Any) -> bool:
    """Return False for every layer."""
    return False


@dataclass(frozen=True)
class Variant:
    """A configuration with some optimizations switched off."""

    name: str
    switches: tuple[Switch, ...] = ()
    engine: str = "auto"


EVALUATION = (
    Variant("all optimizations"),
    Variant("no optimized copy: the model in eager float32 (TF32)", engine="eager"),
    Variant("no bfloat16", (float32_body,)),
    Variant("no folding", (changed(optimized_copy, "_WAYS", ("as it is",)),)),
    Variant("no fused kernels", (changed(optimized_copy, "_WAYS", ("folded", "as it is")),)),
    Variant("first layer in float32, not in two bfloat16 parts", (changed(optimized_copy, "can_split_input", never),)),
    Variant("no channels last", (changed(torch, "channels_last", torch.contiguous_format),)),
    Variant("no CUDA graphs", (changed(cuda_graphs, "MAX_BATCH", 0), changed(optimized_copy, "MAX_BATCH", 0))),
    Variant(
        "CUDA graphs of passes only, not of whole steps",
        (changed(optimized_copy.FoldedCopy, "repeat_steps", OptimizedCopy.repeat_steps),),
    ),
    Variant("targets one by one, not in parallel", (changed(gradient, "CAPACITY", {False: 1, True: 1}),)),
    Variant("Square evaluates proposals one by one", (changed(square, "CAPACITY", {False: 0, True: 0}),)),
    Variant("targets sorted by logits", (changed(CosinePGD, "target_order", gradient.GradientAttack.target_order),)),
)


def evaluation(model: str, weights: str | None, eps: str, per_class: int | None, rounds: int, only: list[str]) -> None:
    """Time the attack ``fast`` on CIFAR-10 in all variants."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attacked, data = load_model(model, weights=weights).eval().to(device), load_data("cifar10", split="test")

    def timed(variant: Variant) -> tuple[float, cw.ClassReport]:
        with ExitStack() as stack:
            for switch in variant.switches:
                stack.enter_context(switch())
            began = time.perf_counter()
            report = cw.evaluate(attacked, data, attacks=["fast"], eps=eps, engine=variant.engine, per_class=per_class)
            seconds = time.perf_counter() - began
        print(f"{variant.name}: {report.attacks['fast'].seconds:.2f} s", file=sys.stderr, flush=True)
        return seconds, report

    runs = {variant.name: partial(timed, variant) for variant in chosen(EVALUATION, only)}
    measured = interleave(runs, 1 + rounds, lambda run: run())
    print(
        row("variant", "attack, s", "whole call, s", "passes per image", "robust, %", "worst, %", "broken by the audit")
    )
    for name, (_, *counted) in measured.items():
        result, info = counted[0][1]["fast"], counted[0][1].attacks["fast"]
        assert info.audit is not None
        cells = [
            median([one.attacks["fast"].seconds for _, one in counted]),
            median([seconds for seconds, _ in counted]),
            f"{(info.forwards + 2 * info.backwards) / result.overall.n:.0f}",
            f"{result.overall.value:.2f}",
            f"{result.worst.value:.1f}" if result.worst else "-",
            f"{info.audit.broke} + {info.audit.broke_random}",
        ]
        print(row(name, *cells))


def median(values: list[float]) -> str:
    """Format the median with the range, as in ``1.00 (0.90-1.10)``."""
    found = spread(values)
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without compiling it."""
    return function


TRAINING = (
    Variant("all optimizations"),
    Variant("no torch.compile", (changed(compiled, "compiled", uncompiled),)),
    Variant(
        "two passes for natural and adversarial images instead of one", (changed(compiled.StepModel, "both", None),)
    ),
    Variant("no folding in the attack", (changed(optimized_copy, "_WAYS", ("as it is",)),)),
    Variant("no fused kernels in the attack", (changed(optimized_copy, "_WAYS", ("folded", "as it is")),)),
    Variant(
        "strided convolutions in the shortcuts",
        (changed(folding, "is_strided_pointwise", never), changed(model_views, "is_strided_pointwise", never)),
    ),
    Variant(
        "first layer in float32, not in two bfloat16 parts",
        (changed(optimized_copy, "can_split_input", never), changed(model_views, "can_split_input", never)),
    ),
    Variant("kernels selected by cuDNN's heuristic", (changed(compiled, "benchmarked_kernels", nullcontext),)),
    Variant("last layer by cuBLAS", (changed(optimized_copy, "FEW_OUTPUTS", 0),)),
    Variant("no fused losses and steps", (changed(compiled, "fusing", nullcontext),)),
    Variant("float32", engine="fp32"),
    Variant("no CUDA graph, no optimized copy: eager bf16", engine="eager-bf16"),
    Variant("eager float32 (TF32)", engine="eager"),
)


def training(batch_size: int, steps: int, model: str, only: list[str]) -> None:
    """Time steps of TRADES with PGD-10 on images of the size of CIFAR-10."""
    print(row("variant", "ms per step", "s for 50,000 images", "warm-up, s"))
    for variant in chosen(TRAINING, only):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            each, warmup = alone.submit(step_time, variant.name, batch_size, steps, model).result()
        cells = f"{1e3 * each:.2f}", f"{each * -(-50_000 // batch_size):.2f}", f"{warmup:.0f}"
        print(row(variant.name, *cells), flush=True)


def step_time(name: str, batch_size: int, steps: int, model: str) -> tuple[float, float]:
    """Return the seconds of a step in one variant, and those of its warm-up."""
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
    """Return the variants whose names contain one of the words; without words, all variants."""
    return [variant for variant in variants if not only or any(word in variant.name for word in only)]


def noise(split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return random images with labels."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (1000, 3, 32, 32), dtype=np.uint8), np.arange(1000) % 10


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["evaluate", "train"])
    parser.add_argument("--weights")
    parser.add_argument("--eps", default="8/255", help="radius (evaluate)")
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after a warm-up round (evaluate)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--only", nargs="*", default=[], help="only variants whose names contain one of these words")
    given = parser.parse_args()
    if given.what == "evaluate":
        evaluation(given.model, given.weights, given.eps, given.per_class, given.rounds, given.only)
    else:
        training(given.batch_size, given.steps, given.model, given.only)


if __name__ == "__main__":
    main()
