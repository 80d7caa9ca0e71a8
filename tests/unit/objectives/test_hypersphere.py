"""Hypersphere embedding: head, scales, margin, optimized copies, averages, and a run from recipe to evaluation."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import root
from torch import nn

import classwise as cw
from classwise.accelerate import make_optimized_copy
from classwise.accelerate.folding import fold_batch_norms
from classwise.accelerate.optimized_copy import _to_bfloat16
from classwise.config.recipes import load_recipe
from classwise.config.spec import settings_of
from classwise.core.errors import InputError
from classwise.core.types import ClassControls
from classwise.models import MODELS, HypersphereHead, resnet18, with_hypersphere
from classwise.models.load import build_model, load_model
from classwise.objectives import HypersphereEmbedding
from classwise.objectives.hypersphere import LARGEST_PROBABILITY, LEAST_SCALE, scale_for
from classwise.training.plan import make_plan
from each import for_each

HE: dict[str, Any] = {"name": "he", "scale": 15, "margin": 0.2}
SPHERE = {"name": "digits-cnn", "head": "hypersphere"}


def head_of(model: nn.Module) -> HypersphereHead:
    (head,) = [module for module in model.modules() if isinstance(module, HypersphereHead)]
    return head


def test_logits_are_scaled_cosines_with_gradients_through_both_lengths() -> None:
    torch.manual_seed(0)
    head = HypersphereHead(5, 3, scale=7).double()
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    logits = head(z)
    for i in range(4):
        for k in range(3):
            cosine = nn.functional.cosine_similarity(z[i], head.weight[k], dim=0)
            assert logits[i, k].item() == pytest.approx(7 * cosine.item())
    assert torch.autograd.gradcheck(head, z)
    # A logit does not change along the features or along its row, so neither does the gradient point there.
    along_z, along_w = torch.autograd.grad(logits[0, 1], (z, head.weight))
    assert (along_z[0] @ z[0]).item() == pytest.approx(0, abs=1e-12)
    assert (along_w[1] @ head.weight[1]).item() == pytest.approx(0, abs=1e-12)
    assert along_w[1].norm() > 0.1
    assert head.bias is None


def test_cosines_keep_their_bits_in_lower_precision() -> None:
    torch.manual_seed(0)
    head, z = HypersphereHead(64, 10, scale=75), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(z), head(z.clone()))
        assert head(z).dtype == torch.float32
        low = head(z)
    assert torch.equal(low, head(z))


@for_each("name", MODELS)
def test_every_architecture_supports_the_head(name: str) -> None:
    assert "head" in settings_of(MODELS[name])
    channels = 1 if name in ("digits-cnn", "small-cnn") else 3
    size = "depth=10,width=1," if name == "wide-resnet" else ""
    model = build_model(f"{name}:{size}head=hypersphere", num_classes=7, in_channels=channels)
    head = head_of(model)
    assert (head.out_features, [*model.modules()][-1]) == (7, head)
    assert (head.weight.norm(dim=1) > 0).all()
    with pytest.raises(InputError, match="head = 'round'"):
        build_model(f"{name}:head=round")


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(InputError, match="no last linear layer"):
        with_hypersphere(nn.Sequential(nn.Conv2d(1, 2, 3)))
    with pytest.raises(InputError, match="no last linear layer"):
        with_hypersphere(nn.Linear(3, 2))


def test_linear_scale_by_hand() -> None:
    """From 1 to 75 in 100 epochs, 0.74 an epoch; with 4 epochs, a quarter of the way each; then it stays."""
    usual = HypersphereEmbedding(schedule="lis")
    assert [usual.scale_at(n, 10) for n in (1, 2, 51, 100, 101, 130)] == pytest.approx([1, 1.74, 38, 74.26, 75, 75])
    short = HypersphereEmbedding(schedule="lis", epochs=4, scale=9)
    assert [short.scale_at(n, 10) for n in range(1, 7)] == [1, 3, 5, 7, 9, 9]
    assert (usual.margin, HypersphereEmbedding().margin, HypersphereEmbedding().scale) == (0, 0.2, 15)


def test_scale_of_the_largest_probability_by_hand() -> None:
    """Ten classes. P = 1/2: e^s = 9 e^-s, s = ln 3. P = 0.2, the first: s = ln(9/4) / 2 = ln 1.5. After 45 of 90
    epochs P = 0.6: s = ln(13.5) / 2. From epoch 91 on P is capped at 1 - 2^-24.
    """
    assert scale_for(0.5, 10) == pytest.approx(math.log(3))
    usual = HypersphereEmbedding(schedule="cmp")
    assert usual.scale_at(1, 10) == pytest.approx(math.log(1.5))
    assert usual.scale_at(46, 10) == pytest.approx(math.log(13.5) / 2)
    last = math.log(9 * (2**24 - 1)) / 2
    assert [usual.scale_at(epoch, 10) for epoch in (91, 100)] == pytest.approx([last, last])
    assert HypersphereEmbedding(schedule="cmp", epochs=30).scale_at(31, 10) == pytest.approx(last)


@given(st.floats(0.2, 0.99), st.sampled_from([10, 100, 1000]))
def test_the_closed_form_solves_equation_3(probability: float, num_classes: int) -> None:
    """Eq. 3 in the extreme case by Powell's method, and by the softmax of such logits."""
    scale = scale_for(probability, num_classes)

    def excess(s: Any) -> Any:
        return -np.log1p((num_classes - 1) * np.exp(-2 * s)) - math.log(probability)

    solved = root(excess, 1.0, method="hybr")
    assert abs(solved.fun[0]) < 1e-12  # at the root itself the solver may report no progress
    assert scale == pytest.approx(float(solved.x[0]), rel=1e-7)
    logits = torch.full((num_classes,), -scale, dtype=torch.float64)
    logits[0] = scale
    assert logits.softmax(0)[0].item() == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("num_classes", [2, 3, 5, 10, 100])
def test_scales_are_positive_and_grow_for_any_number_of_classes(num_classes: int) -> None:
    objective = HypersphereEmbedding(schedule="cmp", epochs=20)
    scales = [objective.scale_at(epoch, num_classes) for epoch in range(1, 25)]
    assert scales == sorted(scales)
    assert scales[0] >= LEAST_SCALE
    assert scales[-1] < 15
    logits = torch.full((num_classes,), -scales[-1], dtype=torch.float64)
    logits[0] = scales[-1]
    assert logits.softmax(0)[0].item() == pytest.approx(LARGEST_PROBABILITY, abs=1e-12)


def test_the_margin_is_in_the_loss_only() -> None:
    """Attacked images are equal with and without the margin, and logits are those of the model."""
    torch.manual_seed(0)
    model = build_model("digits-cnn:head=hypersphere")
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6)
    attack = {"steps": 3, "eps": 0.1}
    found = []
    for margin in (0.0, 0.2):
        objective = HypersphereEmbedding(margin=margin)
        objective = HypersphereEmbedding(margin=margin, attack=type(objective.attack)(**attack))
        random = torch.Generator().manual_seed(0)
        x_adv = objective.perturb(model, x, y, ClassControls.uniform(10), generator=random)
        found.append((x_adv, objective.terms(model, x, x_adv, y)))
    (plain_x, plain), (x_adv, terms) = found
    assert torch.equal(plain_x, x_adv)
    assert torch.equal(plain.logits_adv, terms.logits_adv)
    assert torch.equal(terms.logits_adv, model(x_adv))
    assert (terms.adv > plain.adv).all()


def test_the_scale_is_set_before_each_epoch() -> None:
    model = build_model("digits-cnn:head=hypersphere")
    buffer = head_of(model).scale
    HypersphereEmbedding(schedule="lis").on_epoch(model, 51)
    assert head_of(model).scale is buffer  # a captured step reads this tensor
    assert buffer.item() == pytest.approx(38)
    assert buffer.item() == model.state_dict()["linear.scale"].item()


def test_any_head_with_a_scale_buffer_is_supported() -> None:
    class Mine(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("scale", torch.ones(()))

    model = nn.Sequential(nn.Flatten(), Mine())
    HypersphereEmbedding(scale=8).on_epoch(model, 1)
    assert model[1].scale.item() == 8


def sphere_resnet() -> nn.Module:
    torch.manual_seed(0)
    model = with_hypersphere(resnet18(num_classes=7)).train()
    model(torch.rand(16, 3, 16, 16))
    return model.eval()


def test_an_optimized_copy_follows_scale_and_weights() -> None:
    model, x = sphere_resnet(), torch.rand(4, 3, 16, 16)
    optimized = make_optimized_copy(model, x, lowered=False)
    assert optimized is not None
    assert optimized.how == "folded"
    assert torch.allclose(optimized(x), model(x), rtol=1e-4, atol=1e-4)
    before = optimized(x)
    with torch.no_grad():
        head_of(model).scale.fill_(40.0)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        assert not torch.allclose(optimized(x), model(x), atol=1e-2)
        optimized.refresh(model)
        assert torch.allclose(optimized(x), model(x), rtol=1e-4, atol=1e-3)
        assert not torch.allclose(optimized(x), before, atol=1.0)


def test_the_head_of_an_optimized_copy_in_bfloat16_stays_in_float32() -> None:
    """Only the head is tested, because not every CPU supports bfloat16 products in the body."""
    model, z = sphere_resnet(), torch.randn(4, 512)
    body = fold_batch_norms(copy.deepcopy(model))
    _to_bfloat16(body)
    assert body.get_submodule("layer4.1.conv2").weight.dtype == torch.bfloat16
    assert torch.equal(body.get_submodule("linear")(z), head_of(model)(z))


QUICK: dict[str, Any] = {"epochs": 2, "attack": {"steps": 2}, "model": SPHERE, "device": "cpu"}


@pytest.mark.parametrize("base", ["madry", "trades"])
def test_a_run_is_trained_and_evaluated_with_the_head(base: str, tmp_path: Path) -> None:
    run = cw.train(f"digits/{base}", out=tmp_path, objective={**HE, "base": base}, ema=0.9, **QUICK)
    model = load_model(str(tmp_path))
    assert head_of(model).scale.item() == 15
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        assert (model(x).abs() <= 15.001).all()
        assert torch.equal(model(x), run.load()(x))
    report = cw.evaluate(str(tmp_path), "digits", attacks="fgsm", eps="0.2", per_class=3, device="cpu")
    assert report["natural"].overall.n == 30
    assert run.outcome.history[-1]["loss"] < run.outcome.history[0]["loss"]


@pytest.mark.parametrize(("schedule", "scale"), [("lis", 1 + 74 / 4), ("cmp", math.log(9 * 0.4 / 0.6) / 2)])
def test_scales_grow_in_a_run_and_are_saved(schedule: str, scale: float, tmp_path: Path) -> None:
    """After the second of four epochs they are a quarter of the way."""
    objective = {"name": "he", "schedule": schedule, "epochs": 4}
    cw.train("digits/madry", out=tmp_path, objective=objective, **QUICK)
    assert head_of(load_model(f"{tmp_path}@last")).scale.item() == pytest.approx(scale)


def test_a_model_without_the_head_is_refused_before_training() -> None:
    recipe = load_recipe("digits/madry", {"objective": HE})
    with pytest.raises(InputError, match='needs a hypersphere head: set head = "hypersphere"') as caught:
        make_plan(recipe, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_weight_average_has_the_scale_of_the_model() -> None:
    from classwise.training.averaging import WeightAverage

    model = build_model("digits-cnn:head=hypersphere")
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        head_of(model).scale.fill_(30.0)
    average.on_step(copy.deepcopy(model))
    assert head_of(average.model).scale.item() == 30
