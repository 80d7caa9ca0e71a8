"""The compiled step: which engine a plan takes, and on a GPU the same step as the eager one."""

# B batch, K classes

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import classwise as cw
from classwise.api import make_plan
from classwise.engine import twin_of
from classwise.forward import exact
from classwise.policies import Uniform
from classwise.recipes import load_recipe
from classwise.training import compiled
from classwise.training.compiled import CompiledEngine, Stand
from classwise.training.engine import Engine
from classwise.training.loop import Plan, make_engine
from classwise.types import ClassControls, ClassStats, LossTerms, reduce

CPU = torch.device("cpu")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """On a GPU alone, where the compiler's own warnings are not ours."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: elsewhere a step is eager")
    return skip(pytest.mark.filterwarnings("default")(test))  # type: ignore[no-any-return]


def plan_for(recipe: str = "digits/trades", device: str = "cpu", **changes: Any) -> Plan:
    return make_plan(load_recipe(recipe, {"validation_per_class": 10, **changes}), torch.device(device))


def test_without_a_gpu_training_is_eager_in_float32() -> None:
    for engine in ("auto", "eager"):
        plan = plan_for(engine=engine)
        assert (plan.engine, plan.precision) == ("eager", "fp32")
        assert type(make_engine(plan, plan.model)) is Engine
    with pytest.warns(UserWarning, match="needs a GPU"):
        assert plan_for(engine="compiled").engine == "eager"


def test_warming_up_is_told_apart(tmp_path: Path) -> None:
    run = cw.train("digits/standard", out=tmp_path / "run", epochs=1, device="cpu")
    assert run.outcome.history[0]["warmup"] == 0.0


@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry", "digits/standard"])
@pytest.mark.parametrize("model", ["digits-cnn", "resnet18"])
def test_the_stand_in_gives_the_objective_its_losses_and_gradients(
    recipe: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin, pairs and modes, without the compiler and the graph."""
    monkeypatch.setattr(compiled, "compiled", lambda function: function)
    plan = plan_for(recipe, model=model)
    rows = plan.train[:8]
    x, y = (
        torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.from_numpy(plan.images.labels[rows]),
    )
    controls = ClassControls.uniform(plan.num_classes)
    found = []
    for stands in (False, True):
        own = copy.deepcopy(plan.model).train()
        asked: Any = own
        if stands:
            twin = twin_of(own, x, lowered=False)
            assert twin is not None
            asked = Stand(own, twin, "fp32", CPU)
            twin.refresh(own)
        terms = plan.objective(asked, x, y, controls, generator=torch.Generator().manual_seed(0))
        loss = reduce(terms, y, controls)
        loss.backward()
        assert own.training
        found.append((loss.detach(), [parameter.grad for parameter in own.parameters()], list(own.buffers())))
    (loss, gradients, buffers), (same, others, statistics) = found
    assert torch.allclose(loss, same, rtol=1e-4)
    for mine, theirs in zip(gradients, others, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3 * float(mine.abs().amax()) + 1e-7)
    for mine, theirs in zip(buffers, statistics, strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=1e-3, atol=1e-5)


# On a GPU


def pair(**changes: Any) -> tuple[Plan, Engine, CompiledEngine]:
    """The same plan and weights, eager and compiled."""
    plan = plan_for(device="cuda", batch_size=64, **changes)
    assert plan.engine == "compiled"
    model = plan.model.to("cuda")
    fast = make_engine(plan, copy.deepcopy(model))
    assert isinstance(fast, CompiledEngine)
    eager = Engine(
        model=copy.deepcopy(model),
        objective=plan.objective,
        policy=plan.policy,
        optimizer=plan.optimizer.build(model.parameters()),
        average=None,
        precision=plan.precision,
        clip=plan.clip,
    )
    eager.optimizer = plan.optimizer.build(eager.model.parameters())
    return plan, eager, fast


def batch(plan: Plan, size: int = 64, start: int = 0) -> tuple[Tensor, Tensor]:
    rows = plan.train[start : start + size]
    x = torch.from_numpy(plan.images.images[rows].copy()).float().cuda()
    return x / 255 if plan.images.images.dtype.kind == "u" else x, torch.from_numpy(plan.images.labels[rows]).cuda()


def step(engine: Engine, plan: Plan, x: Tensor, y: Tensor, seed: int = 0, **scales: Tensor) -> tuple[LossTerms, Tensor]:
    uniform = ClassControls.uniform(plan.num_classes)
    controls = ClassControls(**{**{n: getattr(uniform, n) for n in ClassControls.__slots__}, **scales}).to(x.device)
    return engine.step(x, y, controls, torch.Generator("cuda").manual_seed(seed))


def parameters(engine: Engine) -> Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in engine.model.parameters()])


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry", "digits/standard"])
def test_one_step_is_the_eager_step(recipe: str, precision: str) -> None:
    plan, eager, fast = pair(recipe=recipe, precision=precision)
    x, y = batch(plan)
    before = parameters(eager)
    with exact(x.device):
        (_, loss), (_, same) = step(eager, plan, x, y), step(fast, plan, x, y)
    assert fast.captured is not None
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    assert float(same) == pytest.approx(float(loss), rel=tolerance)
    moved, other = parameters(eager) - before, parameters(fast) - before
    cosine = torch.nn.functional.cosine_similarity(moved, other, dim=0)
    assert float(cosine) > (0.999 if precision == "fp32" else 0.95)
    for (name, mine), (_, theirs) in zip(eager.model.named_buffers(), fast.model.named_buffers(), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance), name


@needs_gpu
def test_nothing_is_baked_in() -> None:
    """Learning rate, controls, batch and noise of a replay are those of the call."""
    plan, _, fast = pair(recipe="digits/madry", optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0})
    x, y = batch(plan)
    step(fast, plan, x, y)
    for group in fast.optimizer.param_groups:
        group["lr"] = 0.0
    rest = parameters(fast)
    generator = torch.Generator("cuda").manual_seed(0)
    controls = ClassControls.uniform(plan.num_classes).to(x.device)
    losses = [float(fast.step(x, y, controls, generator)[1]) for _ in range(3)]
    assert torch.equal(parameters(fast), rest)
    assert len(set(losses)) == 3  # another random start every time
    half = step(fast, plan, x, y, weight_adv=torch.full((plan.num_classes,), 0.5))[1].clone()
    whole = step(fast, plan, x, y)[1].clone()
    assert float(half) == pytest.approx(0.5 * sum(losses) / 3, rel=0.05)
    assert float(whole) == pytest.approx(sum(losses) / 3, rel=0.05)
    other = step(fast, plan, *batch(plan, start=64))[1]
    assert float(other) != float(whole)


@needs_gpu
def test_a_batch_of_another_size_takes_the_eager_step_and_the_next_is_replayed() -> None:
    plan, eager, fast = pair()
    sizes = (64, 64, 40, 64)
    for number, size in enumerate(sizes):
        x, y = batch(plan, size, start=64 * number)
        loss, same = (float(step(engine, plan, x, y, seed=number)[1]) for engine in (eager, fast))
        assert same == pytest.approx(loss, rel=0.03)
    apart = parameters(eager) - parameters(fast)
    assert float(apart.norm() / parameters(eager).norm()) < 0.02


@needs_gpu
def test_statistics_come_out_of_a_replay() -> None:
    plan, eager, fast = pair()
    x, y = batch(plan)
    found = []
    for engine in (eager, fast):
        stats = ClassStats.zeros(plan.num_classes, "cuda")
        stats.update(step(engine, plan, x, y)[0], y)
        found.append(stats.cpu())
    assert torch.equal(found[0].n, found[1].n)
    assert (found[0].correct_adv - found[1].correct_adv).abs().sum() <= 3
    assert torch.allclose(found[0].loss, found[1].loss, rtol=0.05)


@needs_gpu
def test_a_policy_that_looks_at_batches_is_part_of_the_step() -> None:
    class Halving(Uniform):
        def on_batch(self, terms: LossTerms, y: Tensor) -> ClassControls:
            even = ClassControls.uniform(10).to(y.device)
            return replace(even, weight_nat=even.weight_nat / 2, weight_adv=even.weight_adv / 2)

    plan, _, fast = pair()
    x, y = batch(plan)
    whole = float(step(fast, plan, x, y)[1])
    _, _, other = pair()
    other.policy = Halving()
    assert float(step(other, plan, x, y)[1]) == pytest.approx(whole / 2, rel=0.02)
    assert other.captured is not None


@needs_gpu
def test_a_policy_that_waits_for_the_device_trains_eagerly_with_a_warning() -> None:
    class Waiting(Uniform):
        def on_batch(self, terms: LossTerms, y: Tensor) -> None:
            float(terms.adv.sum())

    plan, _, fast = pair()
    fast.policy = Waiting()
    with pytest.warns(UserWarning, match="runs eagerly: "):
        step(fast, plan, *batch(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(fast, plan, *batch(plan))


@needs_gpu
def test_a_whole_training_learns_as_well(tmp_path: Path) -> None:
    scores = {}
    for engine in ("eager", "compiled"):
        run = cw.train("digits/trades", out=tmp_path / engine, engine=engine, epochs=6)
        scores[engine] = run.outcome.best_score
        assert (run.outcome.history[0]["warmup"] > 0) == (engine == "compiled")
    assert abs(scores["eager"] - scores["compiled"]) < 0.15
    assert scores["compiled"] > 0.35
