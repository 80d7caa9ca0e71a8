"""The layers of each family: counted by hand-written tables and published counts, and compared with other code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.config import spec
from classwise.core.errors import InputError
from classwise.models import MODELS, GoogLeNet, InceptionV3, LeNet, ViT, WideResNet
from classwise.models.densenet import DenseLayer, DenseNet, Transition
from classwise.models.inception import Branches
from classwise.models.mobilenet import InvertedResidual, MobileNetV2
from classwise.models.vgg import VGG
from classwise.models.vit import Block
from each import for_each


def count(given: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.build("model", MODELS, given).parameters())


def conv(into: int, out: int, area: int, *, bias: bool = False, norm: bool = True) -> int:
    """The parameters of a convolution with this many weights a plane, and of the batch norm after it."""
    return into * out * area + out * bias + 2 * out * norm


# -- published counts -------------------------------------------------------------------------------------

VGG_HEAD = (25_088 * 4_096 + 4_096) + (4_096 * 4_096 + 4_096) + (4_096 * 1_000 + 1_000)  # on a map of 7x7, table 1
AUXILIARY = conv(768, 128, 1) + conv(128, 768, 25) + 768 * 1_000 + 1_000  # of Inception-v3
DENSE_STEM = conv(3, 64, 49) - conv(3, 64, 9, norm=False)


@for_each(
    ("given", "instead", "published"),
    [
        ("resnet18:stem=imagenet,num_classes=1000", 0, 11_689_512),
        ("resnet34:stem=imagenet,num_classes=1000", 0, 21_797_672),
        ("resnet50:stem=imagenet,num_classes=1000", 0, 25_557_032),
        ("vgg16:num_classes=1000", VGG_HEAD - 513_000, 138_365_992),
        ("vgg19:num_classes=1000", VGG_HEAD - 513_000, 143_678_248),
        ("densenet121:num_classes=1000", DENSE_STEM, 7_978_856),
        ("densenet169:num_classes=1000", DENSE_STEM, 14_149_480),
        ("inception-v3:num_classes=1000", AUXILIARY, 27_161_264),
        ("vit:patch=16,image_size=224,num_classes=1000,dim=768,heads=12", 0, 86_567_656),
    ],
)
def test_parameter_counts_of_torchvision(given, instead, published):
    """Torchvision documents its counts for ImageNet; ``instead`` is the difference of its heads and stems to ours."""
    assert count(given) + instead == published


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ("vit:patch=16,image_size=224,num_classes=1000", 5_717_416),  # DeiT-Ti
        ("vit:patch=16,image_size=224,num_classes=1000,dim=384,heads=6", 22_050_664),  # DeiT-S
        ("lenet", 61_706),
        ("lenet:in_channels=3", 62_006),
        ("vgg16", 14_728_266),
        ("densenet121", 6_956_298),
        ("googlenet", 6_166_250),
        ("mobilenet-v2", 2_296_922),
    ],
)
def test_parameter_counts_of_public_code(given, published):
    assert count(given) == published


def test_wide_resnet_accepts_both_ways_of_counting_layers():
    """The WRN-32-10 of Madry et al. has five blocks per stage like WRN-34-10, and the same layers."""
    assert count("wide-resnet:depth=32") == count("wide-resnet:depth=34") == 46_160_474
    assert count("wide-resnet:depth=26,width=1") == count("wide-resnet:depth=28,width=1")
    with torch.device("meta"):
        assert len(WideResNet(depth=32).block2.layer) == 5


# -- counts by tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_lenet_layer_by_layer(channels):
    table = [channels * 6 * 25 + 6, 6 * 16 * 25 + 16, 400 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10]
    assert count(f"lenet:in_channels={channels}") == sum(table)


@pytest.mark.parametrize(("given", "deep"), [("vgg16", 3), ("vgg19", 4)])
def test_vgg_layer_by_layer(given, deep):
    planes = [3, *[64] * 2, *[128] * 2, *[256] * deep, *[512] * deep, *[512] * deep]
    total = sum(conv(into, out, 9, bias=True) for into, out in itertools.pairwise(planes))
    assert count(given) == total + 512 * 10 + 10


@pytest.mark.parametrize(("given", "layers"), [("densenet121", (6, 12, 24, 16)), ("densenet169", (6, 12, 32, 32))])
def test_densenet_layer_by_layer(given, layers):
    total, planes = 3 * 64 * 9, 64
    for number, repeated in enumerate(layers):
        if number:
            total += 2 * planes + planes * (planes // 2)
            planes //= 2
        for _ in range(repeated):
            total += 2 * planes + planes * 128 + 2 * 128 + 128 * 32 * 9
            planes += 32
    assert planes == {"densenet121": 1024, "densenet169": 1664}[given]  # table 1 of the paper
    assert count(given) == total + 2 * planes + planes * 10 + 10


def test_googlenet_layer_by_layer():
    """Table 1 of the paper: into, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool proj, and the sum that it notes."""
    table = [
        (192, 64, 96, 128, 16, 32, 32, 256),
        (256, 128, 128, 192, 32, 96, 64, 480),
        (480, 192, 96, 208, 16, 48, 64, 512),
        (512, 160, 112, 224, 24, 64, 64, 512),
        (512, 128, 128, 256, 24, 64, 64, 512),
        (512, 112, 144, 288, 32, 64, 64, 528),
        (528, 256, 160, 320, 32, 128, 128, 832),
        (832, 256, 160, 320, 32, 128, 128, 832),
        (832, 384, 192, 384, 48, 128, 128, 1024),
    ]
    layers = [(3, 192, 9)]
    for into, one, reduced, three, narrow, five, pool, out in table:
        assert one + three + five + pool == out
        layers += [(into, one, 1), (into, reduced, 1), (reduced, three, 9)]
        layers += [(into, narrow, 1), (narrow, five, 9), (five, five, 9), (into, pool, 1)]
    total = sum(conv(*layer, bias=True) for layer in layers)
    assert count("googlenet") == total + 1024 * 10 + 10


def test_inception_v3_layer_by_layer():
    layers = [(3, 32, 9), (32, 32, 9), (32, 64, 9), (64, 80, 1), (80, 192, 9)]
    for into, pool in ((192, 32), (256, 64), (288, 64)):
        layers += [(into, 64, 1), (into, 48, 1), (48, 64, 25), (into, 64, 1), (64, 96, 9), (96, 96, 9), (into, pool, 1)]
    layers += [(288, 384, 9), (288, 64, 1), (64, 96, 9), (96, 96, 9)]
    for planes in (128, 160, 160, 192):
        layers += [(768, 192, 1), (768, planes, 1), (planes, planes, 7), (planes, 192, 7)]
        layers += [(768, planes, 1), *[(planes, planes, 7)] * 3, (planes, 192, 7), (768, 192, 1)]
    layers += [(768, 192, 1), (192, 320, 9), (768, 192, 1), (192, 192, 7), (192, 192, 7), (192, 192, 9)]
    for into in (1280, 2048):
        layers += [(into, 320, 1), (into, 384, 1), *[(384, 384, 3)] * 2]
        layers += [(into, 448, 1), (448, 384, 9), *[(384, 384, 3)] * 2, (into, 192, 1)]
    assert len(layers) == 94  # the convolutions of the authors' network without its auxiliary head
    assert count("inception-v3") == sum(conv(*layer) for layer in layers) + 2048 * 10 + 10


def test_mobilenet_layer_by_layer():
    """Table 2 of the paper, its rows repeated; a shortcut has weights where planes change and the stride is 1."""
    blocks = [(32, 16, 1, 1), (16, 24, 6, 1), (24, 24, 6, 1), (24, 32, 6, 2), *[(32, 32, 6, 1)] * 2, (32, 64, 6, 2)]
    blocks += [*[(64, 64, 6, 1)] * 3, (64, 96, 6, 1), *[(96, 96, 6, 1)] * 2, (96, 160, 6, 2)]
    blocks += [*[(160, 160, 6, 1)] * 2, (160, 320, 6, 1)]
    total = conv(3, 32, 9) + conv(320, 1280, 1) + 1280 * 10 + 10
    for into, out, expansion, stride in blocks:
        wide = into * expansion
        total += conv(into, wide, 1) + conv(1, wide, 9) + conv(wide, out, 1)
        total += conv(into, out, 1) if stride == 1 and into != out else 0
    assert len(blocks) == 17
    assert count("mobilenet-v2") == total


@pytest.mark.parametrize(("dim", "depth", "heads", "patch"), [(192, 12, 3, 4), (64, 2, 4, 8), (384, 12, 6, 2)])
def test_vit_by_arithmetic(dim, depth, heads, patch):
    block = 4 * dim + (3 * dim * dim + 3 * dim) + (dim * dim + dim) + (8 * dim * dim + 5 * dim)
    tokens = 1 + (32 // patch) ** 2
    total = dim + tokens * dim + 3 * patch * patch * dim + dim + depth * block + 2 * dim + dim * 10 + 10
    assert count(f"vit:dim={dim},depth={depth},heads={heads},patch={patch}") == total


# -- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "maps"),
    [
        ("vgg16", {28: 1, 32: 1, 64: 2, 224: 7}),
        ("densenet121", {28: 3, 32: 4, 64: 8}),
        ("googlenet", {28: 7, 32: 8, 64: 16}),
        ("inception-v3", {28: 6, 32: 7, 64: 15}),
        ("mobilenet-v2", {28: 4, 32: 4, 64: 8}),
        ("resnet18", {28: 4, 32: 4, 64: 8}),
        ("resnet50:stem=imagenet", {32: 1, 64: 2, 224: 7}),
    ],
)
def test_size_of_the_map_before_the_head(given, maps):
    """Height and width of the map before the final pooling: no early reduction; on ImageNet sizes, those of the
    papers.
    """
    with torch.device("meta"):
        model = spec.build("model", MODELS, given).eval()
        seen: list[Tensor] = []
        last = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)][-1]
        if isinstance(model, VGG):
            last = model.features
        last.register_forward_hook(lambda *passed: seen.append(passed[2]))
        for size in maps:
            model(torch.empty(1, 3, size, size))
    assert [tuple(out.shape[2:]) for out in seen] == [(size, size) for size in maps.values()]


# -- what the layers do -----------------------------------------------------------------------------------


@torch.no_grad()
def test_lenet_pads_small_images():
    torch.manual_seed(0)
    model, x = LeNet(), torch.rand(3, 1, 28, 28)
    assert torch.equal(model(x), model(F.pad(x, (2, 2, 2, 2))))
    assert torch.equal(model(x[..., :27]), model(F.pad(x[..., :27], (2, 3, 2, 2))))
    plain = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    x = torch.rand(3, 1, 32, 32)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-6)


@torch.no_grad()
def test_dense_layer_keeps_its_input_and_transition_halves_size():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 4)
    out = DenseLayer(8).eval()(x)
    assert out.shape == (2, 40, 4, 4)
    assert torch.equal(out[:, 32:], x)
    transition = Transition(8, 4).eval()
    transition.conv.weight.copy_(torch.eye(8)[:4, :, None, None])
    scale = (1 + transition.bn.eps) ** -0.5
    torch.testing.assert_close(transition(x), F.avg_pool2d(F.relu(x[:, :4] * scale), 2))


@torch.no_grad()
def test_branches_are_concatenated_in_order():
    branches = Branches({"b1": nn.Identity(), "b2": nn.ReLU(), "b3": nn.MaxPool2d(3, 1, 1)})
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(branches(x), torch.cat([x, x.relu(), F.max_pool2d(x, 3, 1, 1)], 1))


@torch.no_grad()
def test_inverted_residual_with_zero_branch_is_its_shortcut():
    x = torch.randn(2, 8, 4, 4)
    same, changed, strided = (
        InvertedResidual(8, planes, 6, stride).eval() for planes, stride in ((8, 1), (4, 1), (8, 2))
    )
    for block in (same, changed, strided):
        assert block.conv2.groups == block.conv2.in_channels == 48
        block.bn3.weight.zero_()
    assert torch.equal(same(x), x)
    torch.testing.assert_close(changed(x), changed.shortcut(x), rtol=0, atol=0)
    assert torch.equal(strided(x), torch.zeros(2, 8, 2, 2))


@torch.no_grad()
def test_transformer_block_equals_torch():
    torch.manual_seed(0)
    mine = Block(24, 3)
    for parameter in mine.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = nn.TransformerEncoderLayer(
        24, 3, dim_feedforward=96, dropout=0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    theirs.self_attn.in_proj_weight.copy_(mine.attn.qkv.weight)
    theirs.self_attn.in_proj_bias.copy_(mine.attn.qkv.bias)
    pairs = [
        (theirs.self_attn.out_proj, mine.attn.proj),
        (theirs.linear1, mine.mlp.fc1),
        (theirs.linear2, mine.mlp.fc2),
    ]
    for to, source in [*pairs, (theirs.norm1, mine.norm1), (theirs.norm2, mine.norm2)]:
        to.load_state_dict(source.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)


def shuffled(x: Tensor, patch: int, order: Tensor) -> Tensor:
    """The patches of images in another order."""
    side = x.shape[2] // patch
    patches = F.unfold(x, patch, stride=patch)[:, :, order]
    return F.fold(patches, (side * patch, side * patch), patch, stride=patch)


@torch.no_grad()
@pytest.mark.parametrize("size", [32, 24])
def test_transformer_is_permutation_invariant_without_positions(size):
    torch.manual_seed(0)
    model = ViT(dim=48, depth=2, heads=3).double().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.rand(2, 3, size, size, dtype=torch.float64)
    moved = shuffled(x, 4, torch.randperm((size // 4) ** 2))
    assert (model(moved) - model(x)).abs().max() > 1e-3
    model.pos_embed.copy_(model.pos_embed[:, :1].clone())
    torch.testing.assert_close(model(moved), model(x))


@torch.no_grad()
def test_positions_are_interpolated_in_two_dimensions():
    model = ViT(dim=6, depth=1, heads=1)
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    model.pos_embed[0, 1:, 0], model.pos_embed[0, 1:, 1] = row.flatten(), column.flatten()
    assert model._positions(8, 8) is model.pos_embed
    positions = model._positions(8, 4)
    assert torch.equal(positions[:, 0], model.pos_embed[:, 0])
    grid = positions[0, 1:].unflatten(0, (8, 4))
    torch.testing.assert_close(grid[:, :, 0], row[:, :4])
    # The new columns lie halfway between two old ones, at 0.5, 2.5, 4.5 and 6.5; the outer two feel the border.
    torch.testing.assert_close(grid[:, 1:3, 1], torch.tensor([2.5, 4.5]).expand(8, 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("dim=100", "dim=100; expected a multiple of heads=3"),
        ("image_size=30", "image_size=30; expected a multiple of patch=4"),
    ],
)
def test_vit_refuses_indivisible_settings(settings, said):
    with pytest.raises(InputError, match=said):
        spec.build("model", MODELS, f"vit:{settings}")


def test_vit_refuses_images_of_incomplete_patches():
    with pytest.raises(InputError, match="images of 30x32 pixels; expected multiples of patch=4"):
        ViT(dim=12, depth=1)(torch.rand(1, 3, 30, 32))


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [lambda: VGG((2, 2, 4, 4, 4)), GoogLeNet, InceptionV3, lambda: DenseNet((6, 12, 24, 16)), MobileNetV2]
)
def test_he_initialization_of_convolutions(make):
    torch.manual_seed(0)
    model = make()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            n = weight.numel()
            expected = 2 / weight[0].numel()
            # The mean square of n normal numbers has a relative deviation of sqrt(2 / n).
            assert abs(float(weight.square().mean()) / expected - 1) < 6 * (2 / n) ** 0.5, name
            assert module.bias is None or not module.bias.any()


# -- names of checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (
            "vgg16",
            {
                "features.0.weight": (64, 3, 3, 3),
                "features.1.running_mean": (64,),
                "features.40.bias": (512,),
                "features.41.weight": (512,),
                "classifier.weight": (10, 512),
            },
        ),
        ("vgg19", {"features.49.weight": (512, 512, 3, 3), "features.50.weight": (512,), "classifier.bias": (10,)}),
        (
            "densenet121",
            {
                "conv1.weight": (64, 3, 3, 3),
                "dense1.5.conv1.weight": (128, 224, 1, 1),
                "trans1.conv.weight": (128, 256, 1, 1),
                "dense4.15.conv2.weight": (32, 128, 3, 3),
                "bn.weight": (1024,),
                "linear.weight": (10, 1024),
            },
        ),
        (
            "googlenet",
            {
                "pre_layers.0.weight": (192, 3, 3, 3),
                "a3.b2.3.weight": (128, 96, 3, 3),
                "a3.b3.6.weight": (32, 32, 3, 3),
                "b5.b4.1.weight": (128, 832, 1, 1),
                "linear.weight": (10, 1024),
            },
        ),
        (
            "mobilenet-v2",
            {
                "layers.0.conv2.weight": (32, 1, 3, 3),
                "layers.0.shortcut.0.weight": (16, 32, 1, 1),
                "layers.16.bn3.weight": (320,),
                "conv2.weight": (1280, 320, 1, 1),
                "linear.weight": (10, 1280),
            },
        ),
        (
            "vit",
            {
                "cls_token": (1, 1, 192),
                "pos_embed": (1, 65, 192),
                "patch_embed.proj.weight": (192, 3, 4, 4),
                "blocks.11.attn.qkv.weight": (576, 192),
                "blocks.0.mlp.fc1.bias": (768,),
                "norm.weight": (192,),
                "head.weight": (10, 192),
            },
        ),
    ],
)
def test_state_dict_names_of_checkpoints(given, shapes):
    with torch.device("meta"):
        state = spec.build("model", MODELS, given).state_dict()
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
