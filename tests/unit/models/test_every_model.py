"""Every registered architecture on the images, heads and engines it is meant for; a new one is tested by its name."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.accelerate import make_optimized_copy
from classwise.config.spec import Spec
from classwise.config.spec import build as build_spec
from classwise.core.model_calls import both, exact
from classwise.models import MODELS, HypersphereHead
from classwise.models.load import load_model
from classwise.training.model_views import InFloat32, SplitInputConv, bfloat16_view, paired_view
from each import for_each

SETTINGS = {"wide-resnet": "depth=10,width=1", "small-cnn": "dropout=0"}  # too large; random in training
ONE_SIZE = {"digits-cnn": 8, "small-cnn": 28}
SPECS = [f"{name}:{SETTINGS[name]}" if name in SETTINGS else name for name in MODELS]


@pytest.fixture(scope="module", params=[*SPECS, "resnet18:stem=imagenet"])
def given(request):
    """A spec; the scope makes pytest run all tests of one model together, on one instance."""
    return request.param


@pytest.fixture(scope="module")
def model(given):
    """A model as after some training: batch norms have statistics of images. Tests do not change it."""
    return settled(build(given), images(given, 12))


def build(given: str, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    asked = Spec.parse(given)
    return build_spec("model", MODELS, Spec(asked.name, {"in_channels": 3, **asked.options, **settings}))


def images(given: str, n: int, size: int = 16, channels: int = 3) -> Tensor:
    """Coarse patterns under fine noise: images that differ by far more than rounding."""
    size = ONE_SIZE.get(Spec.parse(given).name, size)
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(n, channels, 2, 2, generator=generator)
    fine = torch.rand(n, channels, size, size, generator=generator)
    return 0.8 * F.interpolate(coarse, (size, size), mode="bilinear", align_corners=True) + 0.2 * fine


@torch.no_grad()
def settled(model: nn.Module, x: Tensor) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim < 4:  # some layers are initialized to zero, which hides their effect
            parameter.add_(0.02 * torch.randn_like(parameter))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the average of all batches so far, which is this one
    model.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


@torch.no_grad()
@for_each(("channels", "classes"), [(1, 2), (3, 200)])
def test_common_image_sizes_and_few_or_many_classes(given, channels, classes):
    model = build(given, in_channels=channels, num_classes=classes).eval()
    for size in (28, 32, 64):
        logits = model(images(given, 1, size, channels))
        assert logits.shape == (1, classes)
        assert logits.isfinite().all()


def test_gradient_reaches_every_parameter_and_the_images(given, model):
    x = images(given, 2).requires_grad_()
    loss = F.cross_entropy(model(x), torch.tensor([1, 2]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (x, *parameters))
    for name, gradient in zip(("images", *names), gradients, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name
    assert (gradients[0] != 0).float().mean((1, 2, 3)).min() > 0.5


@torch.no_grad()
def test_weights_round_trip_through_a_file(given, model, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    asked = Spec.parse(given)
    again = load_model(str(Spec(asked.name, {**asked.options, "in_channels": 3})), weights=path)
    stored = model.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in again.state_dict().items())
    assert torch.equal(again(images(given, 2)), model(images(given, 2)))


@torch.no_grad()
def test_hypersphere_head_returns_scaled_cosines(given):
    model = build(given, head="hypersphere", num_classes=7).eval()
    head = [*model.modules()][-1]
    assert isinstance(head, HypersphereHead)
    seen: list[Tensor] = []
    head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model(images(given, 2))
    assert seen[0].shape == (2, head.in_features)
    cosines = F.cosine_similarity(seen[0][:, None], head.weight[None], dim=2)
    torch.testing.assert_close(logits, 15 * cosines, rtol=1e-4, atol=1e-4)


def test_optimized_copy_agrees_and_refreshes(given, model):
    """A model whose code depends on the image size cannot be folded; only networks without batch norm do that."""
    x = images(given, 4)
    optimized = make_optimized_copy(model, x, lowered=False)
    assert optimized is not None
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert optimized.how == "folded" or (optimized.how == "as it is" and not has_norms)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.02)
    optimized.refresh(other)  # with the model itself, and its gradients, make_optimized_copy has compared it
    with torch.no_grad():
        before, expected, got = model(x), other(x), optimized(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3 * float(expected.std()))
    assert (got - before).abs().max() > 1e-2 * float(before.std())


def test_paired_batches_equal_two_passes(given, model):
    """In training mode and double precision: logits, gradients and statistics."""
    model = copy.deepcopy(model).double().train()
    alone, together = copy.deepcopy(model), paired_view(model)
    x, x_adv = images(given, 6, 8).double().chunk(2)
    first, second = together(torch.cat([x, x_adv])).chunk(2)
    one, other = both(alone, x, x_adv)
    torch.testing.assert_close(first, one, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(second, other, rtol=1e-7, atol=1e-7)
    for logits in ((first, second), (one, other)):
        (logits[0].logsumexp(1) + 2 * logits[1].logsumexp(1)).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 1e-7 * theirs.grad.norm() + 1e-7, name
    for (name, mine), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine, theirs), name


def test_bfloat16_view_keeps_first_and_last_layer_and_tensors(model):
    view = bfloat16_view(model)
    kinds = [type(module) for module in view.modules()]
    assert (kinds.count(SplitInputConv), kinds.count(InFloat32)) == (1, 1)
    assert isinstance([*view.modules()][-1], nn.Linear)  # the head is the only linear layer in the float32 wrapper
    assert {id(parameter) for parameter in view.parameters()} == {id(parameter) for parameter in model.parameters()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: bfloat16 takes minutes elsewhere")
def test_bfloat16_view_is_as_accurate_as_autocast_and_trains(given, model):
    model, x = copy.deepcopy(model).cuda(), images(given, 8).cuda()
    logits = bfloat16_view(model).eval()(x)
    with torch.no_grad(), exact(x.device):
        expected = model(x)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        plain = model(x).float()
    # Noise images are similar, and batch norm amplifies their differences and rounding errors, up to the spread of
    # the logits.
    assert (logits - expected).norm() < 1.5 * (plain - expected).norm()
    F.cross_entropy(logits, torch.arange(8, device="cuda")).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
