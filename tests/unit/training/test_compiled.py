"""The compiled step: choice of the engine, and on a GPU equality with the eager step."""

# B batch, K classes

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import classwise as cw
from classwise.accelerate import make_optimized_copy
from classwise.config.recipes import load_recipe
from classwise.core.model_calls import exact
from classwise.core.types import ClassControls, ClassStats, LossTerms, reduce
from classwise.policies import FAAL, Uniform
from classwise.training import compiled
from classwise.training.compiled import CompiledEngine, StepModel, benchmarked_kernels
from classwise.training.engine import Engine
from classwise.training.plan import Plan, make_engine, make_plan

CPU = torch.device("cpu")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test only on a GPU, without errors for the compiler's warnings."""
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


def test_warmup_is_recorded_separately(tmp_path: Path) -> None:
    run = cw.train("digits/standard", out=tmp_path / "run", epochs=1, device="cpu")
    assert run.outcome.history[0]["warmup"] == 0.0


@pytest.mark.parametrize("asked", [None, "cudnn", "torch"])
def test_kernels_are_benchmarked_unless_deterministic(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    if asked == "cudnn":
        monkeypatch.setattr(cudnn, "deterministic", True)
    torch.use_deterministic_algorithms(asked == "torch")
    before = cudnn.benchmark, cudnn.benchmark_limit
    try:
        with benchmarked_kernels():
            tried = cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
    assert tried == (asked is None)
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before


@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry", "digits/standard"])
@pytest.mark.parametrize("model", ["digits-cnn", "resnet18"])
def test_step_model_has_losses_and_gradients_of_the_model(
    recipe: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimized copy, paired passes and modes, without the compiler and the graph."""
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
            optimized = make_optimized_copy(own, x, lowered=False)
            assert optimized is not None
            asked = StepModel(own, optimized, "fp32", CPU)
            optimized.refresh(own)
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
    """A plan with an eager and a compiled engine of equal weights."""
    descent = {"name": "sgd", "lr": 0.1, "momentum": 0.0}  # Adam would amplify the smallest gradients
    plan = plan_for(device="cuda", **{"batch_size": 64, "optimizer": descent, **changes})
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


def step(
    engine: Engine, plan: Plan, x: Tensor, y: Tensor, seed: int = 0, **scales: Tensor
) -> tuple[ClassStats, Tensor]:
    uniform = ClassControls.uniform(plan.num_classes)
    controls = ClassControls(**{**{n: getattr(uniform, n) for n in ClassControls.__slots__}, **scales}).to(x.device)
    return engine.step(x, y, controls, torch.Generator("cuda").manual_seed(seed))


def parameters(engine: Engine) -> Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in engine.model.parameters()])


def moved(engine: Engine, plan: Plan, **scales: Tensor) -> tuple[Tensor, Tensor]:
    """The change of the parameters by one step, and its loss."""
    x, y = batch(plan)
    before = parameters(engine)
    with exact(x.device):
        _, loss = step(engine, plan, x, y, **scales)
    return parameters(engine) - before, loss.clone()


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@needs_gpu
@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry", "digits/standard"])
def test_compiled_step_equals_eager_step(recipe: str) -> None:
    plan, eager, fast = pair(recipe=recipe, precision="fp32")
    (way, loss), (same_way, same_loss) = moved(eager, plan), moved(fast, plan)
    assert fast.captured is not None
    assert float(same_loss) == pytest.approx(float(loss), rel=1e-3)
    assert cosine(way, same_way) > 0.999
    for (name, mine), (_, theirs) in zip(eager.model.named_buffers(), fast.model.named_buffers(), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=1e-3, atol=1e-3), name


@needs_gpu
@pytest.mark.parametrize("recipe", ["digits/trades", "digits/madry", "digits/standard"])
def test_bfloat16_step_is_as_accurate_as_eager(recipe: str) -> None:
    """The two are not closer to each other: signs of small gradients depend on rounding."""
    exactly, reference, _ = pair(recipe=recipe, precision="fp32")
    plan, eager, fast = pair(recipe=recipe, precision="bf16")
    (way, loss), (eager_way, _), (fast_way, fast_loss) = (
        moved(engine, of) for engine, of in ((reference, exactly), (eager, plan), (fast, plan))
    )
    assert fast.captured is not None
    assert float(fast_loss) == pytest.approx(float(loss), rel=0.03)
    assert cosine(fast_way, way) > cosine(eager_way, way) - 0.01


@needs_gpu
@pytest.mark.parametrize("recipe", ["digits/awp", "digits/bat", "digits/he-trades", "digits/targeted", "digits/mart"])
def test_steps_of_other_methods_are_captured(recipe: str) -> None:
    plan, eager, fast = pair(recipe=recipe, precision="fp32")
    eager.awp = copy.deepcopy(plan.awp)
    scales = plan.policy.start(plan.task)
    (way, loss), (same_way, same_loss) = (
        moved(engine, plan, **{name: getattr(scales, name) for name in ClassControls.__slots__})
        for engine in (eager, fast)
    )
    assert fast.captured is not None
    assert float(same_loss) == pytest.approx(float(loss), rel=1e-3)
    assert cosine(way, same_way) > 0.999


@needs_gpu
def test_batch_margin_weights_are_captured() -> None:
    plan, eager, fast = pair(recipe="digits/madry", precision="fp32")
    fast.policy = eager.policy = FAAL()
    (way, loss), (same_way, same_loss) = moved(eager, plan), moved(fast, plan)
    assert fast.captured is not None
    assert float(same_loss) == pytest.approx(float(loss), rel=1e-3)
    assert cosine(way, same_way) > 0.999


@needs_gpu
def test_replay_uses_current_arguments() -> None:
    """A replay uses the learning rate, controls, batch and noise of its call."""
    plan, _, fast = pair(recipe="digits/madry")
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
def test_other_batch_sizes_run_eagerly() -> None:
    plan, eager, fast = pair(precision="fp32")
    for number, size in enumerate((64, 64, 40, 64)):
        x, y = batch(plan, size, start=64 * number)
        with exact(x.device):
            loss, same = (float(step(engine, plan, x, y, seed=number)[1]) for engine in (eager, fast))
        assert same == pytest.approx(loss, rel=1e-3)
    apart = parameters(eager) - parameters(fast)
    assert float(apart.norm() / parameters(eager).norm()) < 1e-3


@needs_gpu
def test_replay_returns_statistics() -> None:
    plan, eager, fast = pair()
    x, y = batch(plan)
    found = []
    for engine in (eager, fast):
        found.append(step(engine, plan, x, y)[0].cpu())
    for name in ("n", "n_nat", "n_adv"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert torch.equal(found[1].confusion_adv.sum(1), found[1].n)
    assert torch.equal(found[1].confusion_adv.diagonal(), found[1].correct_adv)
    assert torch.allclose(found[1].softmax_adv.sum(1), found[1].n.double())
    assert (found[0].correct_adv - found[1].correct_adv).abs().sum() <= 3
    assert torch.allclose(found[0].loss, found[1].loss, rtol=0.05)


@needs_gpu
def test_on_batch_policy_is_captured() -> None:
    class Halving(Uniform):
        def on_batch(self, terms: LossTerms, y: Tensor) -> ClassControls:
            ones = torch.ones(10, device=y.device)
            return ClassControls(weight_nat=ones / 2, weight_adv=ones / 2, eps_scale=ones, beta_scale=ones)

    plan, _, fast = pair()
    x, y = batch(plan)
    whole = float(step(fast, plan, x, y)[1])
    _, _, other = pair()
    other.policy = Halving()
    assert float(step(other, plan, x, y)[1]) == pytest.approx(whole / 2, rel=0.02)
    assert other.captured is not None


@needs_gpu
def test_synchronizing_policy_runs_eagerly_with_warning() -> None:
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
def test_compiled_training_reaches_eager_accuracy(tmp_path: Path) -> None:
    scores = {}
    for engine in ("eager", "compiled"):
        run = cw.train("digits/trades", out=tmp_path / engine, engine=engine, epochs=6)
        scores[engine] = run.outcome.best_score
        assert (run.outcome.history[0]["warmup"] > 0) == (engine == "compiled")
    assert abs(scores["eager"] - scores["compiled"]) < 0.15
    assert scores["compiled"] > 0.35


@needs_gpu
def test_parallel_compiled_runs_equal_single_runs(tmp_path: Path) -> None:
    changes = {"precision": "fp32", "epochs": 3, "engine": "compiled"}
    recipes = {seed: load_recipe("digits/trades", {**changes, "seed": seed}) for seed in range(3)}
    together = cw.train_together({tmp_path / f"together-{seed}": recipe for seed, recipe in recipes.items()})
    for (seed, recipe), run in zip(recipes.items(), together, strict=True):
        alone = cw.train(recipe, out=tmp_path / f"alone-{seed}")
        for mine, theirs in zip(run.outcome.history, alone.outcome.history, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.01)


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_logits_do_not_depend_on_gradient_mode(precision: str) -> None:
    """Close to the image, the TRADES attack follows the difference between natural and perturbed logits.

    If the two were rounded differently, all images of a batch would move in the same direction, which batch norm would
    cancel in training mode.
    """
    plan, _, fast = pair(precision=precision)
    x, y = batch(plan)
    step(fast, plan, x, y)
    assert fast.captured is not None
    step_model = fast.captured.step_model.eval()
    with torch.no_grad():
        clean = step_model(x)
    assert not clean.requires_grad
    moving = step_model(x.clone().requires_grad_())
    assert moving.requires_grad
    assert torch.equal(clean, moving)
