"""Every registered architecture: common properties, and the state-dict names of each family's checkpoints."""

from __future__ import annotations

import copy
import inspect
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.config import spec
from classwise.core.errors import InputError
from classwise.models import MODELS, DigitsCNN, SmallCNN, normalized
from classwise.models.normalize import NORMALIZATIONS, Normalize, with_normalization
from classwise.models.preact_resnet import PreActBlock, PreActResNet
from classwise.models.resnet import BasicBlock, Bottleneck, ResNet
from classwise.models.wide_resnet import WideBlock, WideResNet
from each import for_each

SETTINGS = {"wide-resnet": "depth=10,width=1"}  # the default is too large to run in a unit test
IMAGES = {
    "digits-cnn": (1, 8),
    "lenet": (1, 28),
    "small-cnn": (1, 28),
}  # channels and size; the others take 3 channels, any size


@pytest.fixture(scope="module", params=list(MODELS))
def name(request):
    """Each registered name; the scope makes pytest run all tests of one model together, on one instance."""
    return request.param


@pytest.fixture(scope="module")
def model(name):
    """The registered model; tests do not change it."""
    return make(name)


def make(name: str, *more: str) -> nn.Module:
    """A registered model with perturbed weights, in evaluation mode: zeros would make some tests vacuous."""
    settings = ",".join(filter(None, (SETTINGS.get(name, ""), *more)))
    torch.manual_seed(0)
    model = spec.build("model", MODELS, f"{name}:{settings}" if settings else name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 4:  # convolutions start at random anyway
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def images(name: str, n: int = 2, channels: int | None = None) -> Tensor:
    default, size = IMAGES.get(name, (3, 16))
    return torch.rand(n, channels or default, size, size, generator=torch.Generator().manual_seed(1))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_returns_one_logit_per_class(name, model):
    logits = model(images(name))
    assert logits.shape == (2, 10)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_honors_num_classes_and_in_channels(name):
    model = make(name, "num_classes=7", "in_channels=2")
    assert model(images(name, 3, channels=2)).shape == (3, 7)
    with pytest.raises(RuntimeError, match="channels"):
        model(images(name))


def test_gradient_reaches_every_image(name, model):
    x = images(name, 3).requires_grad_()
    loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2]))
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.isfinite().all()
    reached = (gradient != 0).float().mean((1, 2, 3))
    assert reached.min() > 0.5, reached


@torch.no_grad()
def test_evaluation_is_deterministic_and_independent_of_the_batch(name, model):
    x = images(name, 3)
    logits = model(x)
    assert torch.equal(model(x), logits)
    torch.testing.assert_close(torch.cat([model(one[None]) for one in x]), logits, rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 1e-4  # the logits do depend on the image


@torch.no_grad()
def test_state_dict_round_trip(name, model):
    x, other = images(name), copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


@torch.no_grad()
def test_normalize_equals_manual_normalization(name, model):
    x = images(name)
    which = {1: "mnist", 3: "cifar10"}[x.shape[1]]
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in NORMALIZATIONS[which])
    normalizing = make(name, f"normalize={which}")
    plain = normalizing.model
    torch.testing.assert_close(normalizing(x), plain((x - mean) / std), rtol=0, atol=0)
    assert not torch.allclose(normalizing(x), plain(x))
    inner = {f"model.{key}" for key in model.state_dict()}
    assert set(normalizing.state_dict()) == {"normalize.mean", "normalize.std", *inner}
    assert parameters(normalizing) == parameters(model)  # mean and deviation are not trained


def test_factories_share_their_settings(name):
    settings = inspect.signature(MODELS[name]).parameters
    assert all(setting.kind is setting.KEYWORD_ONLY for setting in settings.values())
    assert {"num_classes", "in_channels", "normalize"} <= set(settings)
    assert settings["num_classes"].default == 10
    assert settings["in_channels"].default == IMAGES.get(name, (3, 0))[0]
    assert settings["normalize"].default is None


@for_each("setting", ["num_classes=0", "in_channels=-1", "normalize=svhn", "num_clases=10"])
def test_invalid_settings_raise_one_line_errors(name, setting):
    with pytest.raises(InputError, match=setting.split("=")[0]) as caught:
        spec.build("model", MODELS, f"{name}:{setting}")
    assert "\n" not in str(caught.value)


# ResNets and WRN-28-10: the counts that public code for CIFAR-10 notes beside its models.
# Pre-activation, from ResNet-18: no stem norm (-128), first norms on a stage's input (-128 - 256 - 512), no
# shortcut norms (-256 - 512 - 1024), final norm (+1024): 11,173,962 - 1,792.
# WRN-34-10: the arithmetic of the test below.
# SmallCNN: 320 + 9,248 + 18,496 + 36,928 in convolutions, 205,000 + 40,200 + 2,010 in linear layers.
@for_each(
    ("given", "count"),
    [
        ("digits-cnn", 160 + 4_640 + 18_496 + 2_570),
        ("small-cnn", 312_202),
        ("resnet18", 11_173_962),
        ("resnet34", 21_282_122),
        ("resnet50", 23_520_842),
        ("preact-resnet18", 11_172_170),
        ("preact-resnet18:final_bn=false", 11_171_146),
        ("wide-resnet:depth=28", 36_479_194),
        ("wide-resnet", 46_160_474),
    ],
)
def test_known_parameter_counts(given, count):
    with torch.device("meta"):
        assert parameters(spec.build("model", MODELS, given)) == count


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2), (28, 10), (34, 10), (34, 20), (70, 16)])
def test_wide_resnet_counts_by_arithmetic(depth, width):
    planes = [16, 16 * width, 32 * width, 64 * width]
    total = 3 * 9 * 16 + 2 * planes[3] + planes[3] * 10 + 10
    for a, b in itertools.pairwise(planes):
        first = 2 * a + 9 * a * b + 2 * b + 9 * b * b + (a * b if a != b else 0)
        total += first + ((depth - 4) // 6 - 1) * (4 * b + 18 * b * b)
    with torch.device("meta"):
        assert parameters(WideResNet(depth=depth, width=width)) == total


def conv(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape}


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str, planes: int) -> dict[str, tuple[int, ...]]:
    vectors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (planes,))
    return {f"{name}.{key}": shape for key, shape in {**vectors, "num_batches_tracked": ()}.items()}


def shapes(model: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name.startswith(prefix)}


def test_names_of_small_cnn():
    features = {"conv1": (32, 1), "conv2": (32, 32), "conv3": (64, 32), "conv4": (64, 64)}
    expected = {}
    for name, (out, into) in features.items():
        expected |= conv(f"feature_extractor.{name}", out, into, 3, 3)
        expected[f"feature_extractor.{name}.bias"] = (out,)
    expected |= linear("classifier.fc1", 200, 1024)
    expected |= linear("classifier.fc2", 200, 200)
    expected |= linear("classifier.fc3", 10, 200)
    model = SmallCNN()
    assert shapes(model) == expected
    assert isinstance(model.classifier.drop, nn.Dropout)
    assert model.classifier.drop.p == 0.5


def test_names_of_resnet():
    with torch.device("meta"):
        basic = ResNet(BasicBlock, (2, 2, 2, 2))
        deep = ResNet(Bottleneck, (3, 4, 6, 3))
    assert list(dict(basic.named_children())) == [
        "conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "linear",
    ]  # fmt: skip
    assert len(basic.state_dict()) == 122
    assert shapes(basic, "conv1") == conv("conv1", 64, 3, 3, 3)
    assert shapes(basic, "bn1") == norm("bn1", 64)
    assert shapes(basic, "linear") == linear("linear", 10, 512)
    assert shapes(basic, "layer1.0.shortcut") == {}
    assert shapes(basic, "layer2.0.") == {
        **conv("layer2.0.conv1", 128, 64, 3, 3),
        **norm("layer2.0.bn1", 128),
        **conv("layer2.0.conv2", 128, 128, 3, 3),
        **norm("layer2.0.bn2", 128),
        **conv("layer2.0.shortcut.0", 128, 64, 1, 1),
        **norm("layer2.0.shortcut.1", 128),
    }
    assert shapes(deep, "layer1.0.") == {
        **conv("layer1.0.conv1", 64, 64, 1, 1),
        **norm("layer1.0.bn1", 64),
        **conv("layer1.0.conv2", 64, 64, 3, 3),
        **norm("layer1.0.bn2", 64),
        **conv("layer1.0.conv3", 256, 64, 1, 1),
        **norm("layer1.0.bn3", 256),
        **conv("layer1.0.shortcut.0", 256, 64, 1, 1),
        **norm("layer1.0.shortcut.1", 256),
    }
    assert "layer3.5.conv3.weight" in deep.state_dict()
    assert "layer3.6.conv1.weight" not in deep.state_dict()


def test_names_of_preact_resnet():
    with torch.device("meta"):
        model, plain = PreActResNet((2, 2, 2, 2)), PreActResNet((2, 2, 2, 2), final_bn=False)
    assert shapes(model, "layer2.0.") == {
        **norm("layer2.0.bn1", 64),
        **conv("layer2.0.conv1", 128, 64, 3, 3),
        **norm("layer2.0.bn2", 128),
        **conv("layer2.0.conv2", 128, 128, 3, 3),
        **conv("layer2.0.shortcut.0", 128, 64, 1, 1),
    }
    assert shapes(model, "layer1.1.shortcut") == {}
    assert set(shapes(model)) - set(shapes(plain)) == set(norm("bn", 512))
    assert shapes(model, "linear") == linear("linear", 10, 512)
    assert "bn1.weight" not in shapes(model)


def test_names_of_wide_resnet():
    model = WideResNet(depth=16, width=2)
    assert list(dict(model.named_children())) == ["conv1", "block1", "block2", "block3", "bn1", "fc"]
    assert shapes(model, "block1.layer.0.") == {
        **norm("block1.layer.0.bn1", 16),
        **conv("block1.layer.0.conv1", 32, 16, 3, 3),
        **norm("block1.layer.0.bn2", 32),
        **conv("block1.layer.0.conv2", 32, 32, 3, 3),
        **conv("block1.layer.0.convShortcut", 32, 16, 1, 1),
    }
    assert shapes(model, "block3.layer.1.convShortcut") == {}
    assert "block3.layer.1.conv2.weight" in shapes(model)
    assert "block3.layer.2.conv2.weight" not in shapes(model)
    assert shapes(model, "bn1") == norm("bn1", 128)
    assert shapes(model, "fc") == linear("fc", 10, 128)


def mixed(module: nn.Module) -> nn.Module:
    """Set random batch-norm statistics, so that a missing batch norm changes the result."""
    torch.manual_seed(2)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return module.eval()


@torch.no_grad()
@pytest.mark.parametrize(("kind", "more"), [(PreActBlock, ()), (WideBlock, (0.3,))])
def test_preactivation_block_with_zero_branch_is_the_identity(kind, more):
    block = mixed(kind(8, 8, 1, *more))
    block.conv2.weight.zero_()
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(block(x), x)


@torch.no_grad()
def test_preactivation_shortcut_uses_the_activated_input():
    x = torch.randn(2, 8, 4, 4)
    narrow, wide = mixed(PreActBlock(8, 16, 2)), mixed(WideBlock(8, 16, 2, 0.0))
    for block, shortcut in ((narrow, narrow.shortcut), (wide, wide.convShortcut)):
        block.conv2.weight.zero_()
        torch.testing.assert_close(block(x), shortcut(F.relu(block.bn1(x))), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_residual_block_with_zero_branch_is_its_rectified_shortcut(kind):
    x = torch.randn(2, 8, 4, 4)
    block = mixed(kind(8, 4, 2))
    last = block.bn3 if kind is Bottleneck else block.bn2
    last.weight.zero_()
    last.bias.zero_()
    expected = F.batch_norm(
        F.conv2d(x, block.shortcut[0].weight, stride=2),
        block.shortcut[1].running_mean,
        block.shortcut[1].running_var,
        block.shortcut[1].weight,
        block.shortcut[1].bias,
    )
    torch.testing.assert_close(block(x), F.relu(expected))


@torch.no_grad()
def test_pooling_equals_the_originals_on_cifar_images():
    x = torch.rand(1, 3, 32, 32)
    resnet = mixed(ResNet(BasicBlock, (1, 1, 1, 1)))
    out = F.relu(resnet.bn1(resnet.conv1(x)))
    for stage in (resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4):
        out = stage(out)
    torch.testing.assert_close(resnet(x), resnet.linear(F.avg_pool2d(out, 4).flatten(1)))

    wide = mixed(WideResNet(depth=10, width=1))
    out = wide.block3(wide.block2(wide.block1(wide.conv1(x))))
    torch.testing.assert_close(wide(x), wide.fc(F.avg_pool2d(F.relu(wide.bn1(out)), 8).flatten(1)))

    for final_bn in (True, False):
        preact = mixed(PreActResNet((1, 1, 1, 1), final_bn=final_bn))
        out = preact.conv1(x)
        for stage in (preact.layer1, preact.layer2, preact.layer3, preact.layer4):
            out = stage(out)
        if final_bn:
            out = F.relu(preact.bn(out))
        torch.testing.assert_close(preact(x), preact.linear(F.avg_pool2d(out, 4).flatten(1)))


@pytest.mark.parametrize("size", [8, 20, 64])
def test_residual_networks_accept_other_image_sizes(size):
    x = torch.rand(1, 3, size, size)
    for model in (ResNet(BasicBlock, (1, 1, 1, 1)), WideResNet(depth=10, width=1)):
        assert model.eval()(x).shape == (1, 10)


@pytest.mark.parametrize("depth", [4, 11, 33])
def test_wide_resnet_refuses_invalid_depths(depth):
    with pytest.raises(InputError, match=rf"depth={depth}; expected 6n \+ 4"):
        WideResNet(depth=depth, width=1)


def test_wide_resnet_initialization():
    torch.manual_seed(0)
    model = WideResNet(depth=10, width=4)
    weight = model.block3.layer[0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.02)
    assert model.fc.bias.eq(0).all()
    assert model.bn1.weight.eq(1).all()


def test_dropout_applies_in_training_only():
    x = torch.rand(2, 3, 16, 16)
    model = make("wide-resnet", "dropout=0.5")
    with torch.no_grad():
        assert torch.equal(model(x), make("wide-resnet")(x))
        layer = model.block1.layer[0].train()
        hidden = model.conv1(x)
        assert not torch.equal(layer(hidden), layer(hidden))
        plain = make("wide-resnet").block1.layer[0].train()
        assert torch.equal(plain(hidden), plain(hidden))


def test_small_cnn_starts_with_equal_logits_and_has_dropout():
    model = SmallCNN()
    x = torch.rand(2, 1, 28, 28)
    assert model.eval()(x).eq(0).all()
    convolutions = [layer for layer in model.feature_extractor if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 4
    assert all(layer.bias.eq(0).all() for layer in convolutions)
    last = convolutions[-1].weight
    assert last.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.03)  # He et al., by fan-in
    nn.init.ones_(model.classifier.fc3.weight)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_digits_cnn_is_small_and_has_no_state_of_its_own():
    model = DigitsCNN()
    assert parameters(model) < 50_000
    assert not list(model.buffers())


def test_normalized_wraps_any_module():
    model = normalized(nn.Flatten(), (0.5, 0.25), (2.0, 4.0))
    out = model(torch.ones(1, 2, 1, 1))
    assert out.tolist() == [[0.25, 0.1875]]
    assert "0.25" in repr(model)


@pytest.mark.parametrize(
    ("mean", "std"),
    [((), ()), ((0.5,), (0.5, 0.5)), ((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((math.nan,), (1.0,))],
)
def test_normalize_refuses_invalid_numbers(mean, std):
    with pytest.raises(InputError, match="expected"):
        Normalize(mean, std)


def test_named_normalizations_must_fit_the_channels():
    model = nn.Flatten()
    assert with_normalization(model, None, 1) is model
    with pytest.raises(InputError, match="normalize=cifar10 is for 3 channels, but the model has in_channels=1"):
        with_normalization(model, "cifar10", 1)
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        with_normalization(model, "cifar11", 3)
