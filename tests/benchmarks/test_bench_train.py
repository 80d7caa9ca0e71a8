"""Benchmark of training: the reference style equals our objectives, and the numbers are correct."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.reference_style import LOSSES, Inner
from benchmarks.result import Bench
from benchmarks.train import REFERENCE, bench_training
from classwise.attacks import PGD
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.core.progress import SILENT
from classwise.core.threat import Start
from classwise.core.types import ClassControls, reduce
from classwise.objectives import OBJECTIVES
from classwise.training.plan import make_plan

CPU = torch.device("cpu")
EPS, STEP_SIZE, STEPS, CLASSES = 0.1, 0.03, 4, 10


def run(recipe: str, *, clock: Callable[[], float] | None = None, **overrides: Any) -> Any:
    made = load_recipe(recipe, {"batch_size": 8, "attack.steps": 2} | overrides)
    plan = make_plan(made, CPU, SILENT)
    name = str(made.objective["name"])
    return read(bench_training(plan, objective=name, overrides={}, steps=2, rounds=3, peers=True, clock=clock))


def read(bench: Bench) -> Any:
    """The content of ``bench.json`` with attributes for keys."""
    return json.loads(json.dumps(bench.content), object_hook=lambda found: SimpleNamespace(**found))


@pytest.mark.parametrize(
    ("name", "loss", "start", "settings"),
    [
        ("trades", "kl", "gaussian", {"beta": 4.0}),
        ("trades", "kl", "uniform", {"beta": 1.0}),
        ("madry", "ce", "uniform", {}),
        ("madry", "ce", "zero", {}),
    ],
)
def test_reference_style_equals_the_objective(name: str, loss: Any, start: Start, settings: dict[str, float]) -> None:
    """With the same noise, in float64: equal loss, and equal gradients of every weight."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, CLASSES)]
    ours = nn.Sequential(*body).double().train()
    theirs = copy.deepcopy(ours)
    x, y = torch.rand(16, 1, 8, 8, dtype=torch.float64), torch.randint(CLASSES, (16,))
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, loss=loss, start=start)
    objective: Any = OBJECTIVES[name](attack=attack, **settings)  # type: ignore[call-arg]
    controls = ClassControls.uniform(CLASSES)
    mine = reduce(objective(ours, x, y, controls, generator=torch.Generator().manual_seed(5)), y, controls)
    torch.manual_seed(5)
    inner = Inner(eps=EPS, step_size=STEP_SIZE, steps=STEPS, start=start)
    other = LOSSES[name](theirs, x, y, inner, settings.get("beta", 1.0))
    assert other.item() == pytest.approx(mine.item(), rel=1e-9)
    mine.backward()
    theirs.zero_grad()
    other.backward()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, atol=1e-9, rtol=1e-7)
    clean = nn.functional.cross_entropy(theirs(x), y).item()
    assert other.item() > clean + 1e-3  # the attack did something


def test_both_implementations_reach_the_same_loss() -> None:
    for recipe in ("digits/trades", "digits/madry"):
        ours, theirs = run(recipe).entries
        assert (ours.name, theirs.name) == ("classwise", REFERENCE)
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-3), recipe


def test_different_training_gives_different_losses() -> None:
    """With another beta the losses differ."""
    recipe = load_recipe("digits/trades", {"batch_size": 8, "attack.steps": 2})
    entries = []
    for beta in (6.0, 1.0):
        plan = make_plan(load_recipe(recipe, {"objective.beta": beta}), CPU, SILENT)
        found = bench_training(plan, objective="trades", overrides={}, steps=10, rounds=2, peers=True)
        entries.append(read(found).entries)
    for ours, theirs in entries:
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-3)
    assert entries[0][0].loss != pytest.approx(entries[1][1].loss, rel=1e-2)


def readings(durations: list[float]) -> Iterator[float]:
    """Readings of a clock before and after runs of these durations."""
    starts = accumulate(durations, initial=0.0)
    return chain.from_iterable((start, start + seconds) for start, seconds in zip(starts, durations, strict=False))


def test_medians_by_an_injected_clock() -> None:
    """Two steps per round; the second round begins with the other implementation."""
    shown = readings([50, 70, 4, 8, 14, 2, 6, 10])  # warm-up: ours, theirs; then o t, t o, o t
    found = run("digits/trades", clock=lambda: next(shown))
    ours, theirs = found.entries
    assert ours.step.values == [2, 1, 3]
    assert theirs.step.values == [4, 7, 5]
    assert (ours.warm_up, ours.step.median, ours.ratio) == (50, 2, 1)
    assert (theirs.warm_up, theirs.step.median, theirs.ratio) == (70, 5, 2.5)
    examples = len(make_plan(load_recipe("digits/trades"), CPU, SILENT).train)
    assert found.steps_per_epoch == -(-examples // 8)
    assert theirs.epoch == 5 * found.steps_per_epoch
    assert next(shown, None) is None


def test_reference_style_without_support_is_left_out() -> None:
    for name, overrides, note in (
        ("digits/standard", {"attack": {}}, "it has trades and madry, not standard"),
        ("digits/trades", {"norm": "L2", "eps": "1.0"}, "it attacks by PGD in the Linf ball"),
    ):
        recipe = load_recipe(name, {"batch_size": 8, **overrides})
        objective = str(recipe.objective["name"])
        plan = make_plan(recipe, CPU, SILENT)
        found = read(bench_training(plan, objective=objective, overrides={}, steps=1, rounds=1, peers=True))
        assert [entry.name for entry in found.entries] == ["classwise"], name
        assert found.notes == [f"reference style is left out: {note}"]


def test_the_weight_average_is_mentioned() -> None:
    assert any("weight average" in note for note in run("digits/trades", ema=0.9).notes)


def test_bad_settings() -> None:
    plan = make_plan(load_recipe("digits/trades"), CPU, SILENT)
    for settings, message in (({"steps": 0}, "steps must be at least 1"), ({"rounds": 0}, "rounds must be at least 1")):
        with pytest.raises(InputError, match=message):
            bench_training(plan, objective="trades", overrides={}, **settings)


def test_diverged_training_has_no_loss() -> None:
    found = run("digits/trades", optimizer={"name": "sgd", "lr": 1e30})
    assert [entry.loss for entry in found.entries] == [None, None]
