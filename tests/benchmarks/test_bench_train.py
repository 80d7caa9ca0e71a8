"""Training side by side: the reference style does the same work as our objectives, and the figures are right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.reference_style import LOSSES, Inner
from benchmarks.result import TrainingBench
from benchmarks.save import save
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


def run(recipe: str, *, clock: Callable[[], float] | None = None, **overrides: Any) -> TrainingBench:
    read = load_recipe(recipe, {"batch_size": 8, "attack.steps": 2} | overrides)
    plan = make_plan(read, CPU, SILENT)
    name = str(read.objective["name"])
    return bench_training(plan, objective=name, overrides={}, steps=2, rounds=3, peers=True, clock=clock)


@pytest.mark.parametrize(
    ("name", "loss", "start", "settings"),
    [
        ("trades", "kl", "gaussian", {"beta": 4.0}),
        ("trades", "kl", "uniform", {"beta": 1.0}),
        ("madry", "ce", "uniform", {}),
        ("madry", "ce", "zero", {}),
    ],
)
def test_reference_style_is_the_objective(name: str, loss: Any, start: Start, settings: dict[str, float]) -> None:
    """From the same noise in float64: the same loss, the same gradient of every weight."""
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


@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry"])
def test_both_sides_reach_the_same_loss(recipe: str) -> None:
    ours, theirs = run(recipe).entries
    assert (ours.name, theirs.name) == ("classwise", REFERENCE)
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-3)


def test_the_loss_tells_when_they_do_not_do_the_same() -> None:
    """The check can fail: with another beta the losses part."""
    read = load_recipe("digits/trades", {"batch_size": 8, "attack.steps": 2})
    entries = []
    for beta in (6.0, 1.0):
        plan = make_plan(load_recipe(read, {"objective.beta": beta}), CPU, SILENT)
        found = bench_training(plan, objective="trades", overrides={}, steps=10, rounds=2, peers=True)
        entries.append(found.entries)
    for ours, theirs in entries:
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-3)
    assert entries[0][0].loss != pytest.approx(entries[1][1].loss, rel=1e-2)


def readings(durations: list[float]) -> Iterator[float]:
    """What a clock shows that is read before and after each of these."""
    starts = accumulate(durations, initial=0.0)
    return chain.from_iterable((start, start + seconds) for start, seconds in zip(starts, durations, strict=False))


def test_medians_by_an_injected_clock() -> None:
    """Two steps a round; the second round begins with the other side."""
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


@pytest.mark.parametrize(
    ("recipe", "overrides", "note"),
    [
        ("digits/standard", {"attack": {}}, "it knows trades and madry, not standard"),
        ("digits/trades", {"norm": "L2", "eps": "1.0"}, "it attacks by PGD in the Linf ball"),
    ],
)
def test_what_the_reference_style_does_not_know_is_left_out(recipe: str, overrides: dict[str, Any], note: str) -> None:
    read = load_recipe(recipe, {"batch_size": 8} | overrides)
    plan = make_plan(read, CPU, SILENT)
    found = bench_training(plan, objective=str(read.objective["name"]), overrides={}, steps=1, rounds=1, peers=True)
    assert [entry.name for entry in found.entries] == ["classwise"]
    assert found.notes == [f"reference style is left out: {note}"]


def test_the_weight_average_is_mentioned() -> None:
    assert any("weight average" in note for note in run("digits/trades", ema=0.9).notes)


def test_bad_settings() -> None:
    plan = make_plan(load_recipe("digits/trades"), CPU, SILENT)
    for settings, message in (({"steps": 0}, "steps must be at least 1"), ({"rounds": 0}, "rounds must be at least 1")):
        with pytest.raises(InputError, match=message):
            bench_training(plan, objective="trades", overrides={}, **settings)


def test_a_side_that_diverges_is_told_so(tmp_path: Path) -> None:
    found = run("digits/trades", optimizer={"name": "sgd", "lr": 1e30})
    assert [entry.loss for entry in found.entries] == [None, None]
    save(found, tmp_path)
    assert (tmp_path / "bench.md").read_text().count("diverged") == 2
