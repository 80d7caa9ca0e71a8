"""Every repair method: the original is unchanged, results are reproducible, and the equations of each paper hold."""

# B batch, N examples, K classes, D features

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.attacks import PGD
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.progress import Epoch, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import ClassControls, ClassStats
from classwise.data import Batches, ImageSet, balanced_split, load_data
from classwise.models import HypersphereHead
from classwise.objectives import Madry
from classwise.policies import FAAL
from classwise.repairs.methods import METHODS, Case
from classwise.repairs.methods.finetune import Finetune, Spectral, SpectralPairs, pair_weights, split
from classwise.repairs.methods.head_sam import HeadSAM, sharpness_aware_gradient
from classwise.repairs.methods.norms import Norms
from classwise.repairs.methods.retrain import Retrain, balanced_order

K = 3
HEAD_METHODS = ["norms", "head-sam", "retrain"]


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    """The first forty images each of the digits 0, 1 and 2."""
    found = load_data("digits", split="train")
    rows = np.concatenate([np.flatnonzero(found.labels == label)[:40] for label in range(K)])
    return ImageSet(
        name="digits", split="train", images=found.images[rows], labels=found.labels[rows], classes=("0", "1", "2")
    )


def network(*, bias: bool = True) -> nn.Module:
    """A model with batch norm and dropout, whose state could be changed by mistake."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(36, K, bias=bias),
        )
    model[0].weight.requires_grad_(False)
    return model.train()


def case_of(images: ImageSet, model: nn.Module | None = None, **more: Any) -> Case:
    train, index = balanced_split(images.labels, 12, 0, K)
    given = {"images": images, "index": index, "train": train, "threat": Threat.parse("0.1"), "seed": 3}
    return Case(model=network() if model is None else model, **{**given, **more})


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flags(model: nn.Module) -> tuple[list[bool], list[bool]]:
    return [module.training for module in model.modules()], [one.requires_grad for one in model.parameters()]


def changed(case: Case, model: nn.Module) -> set[str]:
    before = case.model.state_dict()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("method", [*METHODS, "finetune:how=spectral"])
def test_the_original_is_unchanged_and_the_same_seed_gives_the_same_model(method: str, digits: ImageSet) -> None:
    case = case_of(digits)
    before, modes, random = state(case.model), flags(case.model), torch.get_rng_state()
    chosen = build("repair method", METHODS, method)
    assert type(chosen).about
    first = chosen(case).model
    assert same(state(case.model), before)
    assert flags(case.model) == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in case.model.parameters())
    torch.rand(7)  # another global state
    second = chosen(case).model
    assert same(state(first), state(second))
    assert flags(first) == modes
    assert {name: value.shape for name, value in state(first).items()} == {n: v.shape for n, v in before.items()}


@pytest.mark.parametrize("method", ["head-sam", "retrain", "finetune", "finetune:how=spectral"])
def test_another_seed_gives_another_model(method: str, digits: ImageSet) -> None:
    chosen = build("repair method", METHODS, method)
    first, second = (chosen(case_of(digits, seed=seed)).model for seed in (3, 4))
    assert not same(state(first), state(second))


@pytest.mark.parametrize("method", ["head-sam", "retrain"])
@pytest.mark.parametrize("bias", [True, False])
def test_only_the_last_layer_is_trained(method: str, bias: bool, digits: ImageSet) -> None:
    case = case_of(digits, network(bias=bias))
    expected = {"5.weight", "5.bias"} if bias else {"5.weight"}
    assert changed(case, METHODS[method]()(case).model) == expected


class Scaled(nn.Module):
    """Logits that are not the outputs of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, K)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x.flatten(1))


def without_a_plain_head() -> dict[str, nn.Module]:
    return {
        "no last linear layer": nn.Sequential(nn.Conv2d(1, K, 8), nn.Flatten()),
        "HypersphereHead": nn.Sequential(nn.Flatten(), HypersphereHead(64, K)),
        "differ from the outputs of its last linear layer": Scaled(),
    }


@pytest.mark.parametrize("reason", without_a_plain_head())
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_head_methods_refuse_other_heads(method: str, reason: str, digits: ImageSet) -> None:
    case = case_of(digits, without_a_plain_head()[reason])
    with pytest.raises(InputError, match=reason) as caught:
        METHODS[method]()(case)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reason", without_a_plain_head())
def test_finetune_accepts_any_head(reason: str, digits: ImageSet) -> None:
    case = case_of(digits, without_a_plain_head()[reason])
    assert changed(case, Finetune(epochs=1)(case).model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("head-sam:rho=-1", "rho must not be negative"),
        ("head-sam:epochs=0", "epochs must be at least 1, got 0"),
        ("head-sam:steps=0", "steps = 0: must be at least 1"),
        ("retrain:batch_size=0", "batch_size must be at least 1, got 0"),
        ("retrain:lr=0", "lr must be positive"),
        ("finetune:how=fall", "how = 'fall'"),
        ("finetune:radius=0", "radius must be positive"),
        ("finetune:awp=-1", "gamma must be positive"),
    ],
)
def test_invalid_settings_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("repair method", METHODS, spec)


def test_norms_equalizes_rows_and_keeps_directions_and_biases(digits: ImageSet) -> None:
    case = case_of(digits)
    model = Norms()(case).model
    assert changed(case, model) == {"5.weight"}
    before, after = case.model[5].weight.detach(), model[5].weight.detach()
    lengths = torch.tensor([float((row.double() ** 2).sum() ** 0.5) for row in before])
    torch.testing.assert_close(after, before / lengths[:, None] * lengths.mean())
    torch.testing.assert_close(after.norm(dim=1), lengths.mean().expand(K))


def test_norms_leaves_a_row_of_zeros(digits: ImageSet) -> None:
    model = network()
    with torch.no_grad():
        model[5].weight[1] = 0
    after = Norms()(case_of(digits, model)).model[5].weight.detach()
    assert not after[1].any()
    assert bool(after.isfinite().all())


def autograd_gradient(weight: Tensor, bias: Tensor, features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean cross-entropy, for weight and bias."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = F.cross_entropy(features @ weight.T + bias, y)
    return torch.autograd.grad(loss, (weight, bias))


def test_head_sam_without_radius_is_a_step_on_the_mean_over_classes(digits: ImageSet) -> None:
    train = np.concatenate([np.arange(30), np.arange(40, 50), np.arange(80, 100)])  # 30, 10 and 20 of the classes
    case = case_of(digits, train=train)
    after = HeadSAM(rho=0, lr=0.5, momentum=0, batch_size=60)(case).model[5]
    (batch,) = Batches(digits, train, batch_size=60, device="cpu", generator=torch.Generator().manual_seed(3))
    x, y, _ = batch
    model = copy.deepcopy(case.model).eval()
    x_adv = PGD(eps="0.1", steps=10)(model, x, y, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        features = model[:5](x_adv)
    weight, bias = model[5].weight.detach(), model[5].bias.detach()
    each = [autograd_gradient(weight, bias, features[y == one], y[y == one]) for one in range(K)]
    torch.testing.assert_close(after.weight, weight - 0.5 * torch.stack([w for w, _ in each]).mean(0))
    torch.testing.assert_close(after.bias, bias - 0.5 * torch.stack([b for _, b in each]).mean(0))


def test_class_gradients_use_separately_perturbed_weights() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(9, 5, generator=random, dtype=torch.float64)
    weights = torch.randn(4, 5, generator=random, dtype=torch.float64)
    y, rho, none = torch.tensor([0, 2, 2, 3, 0, 0, 2, 3, 0]), 0.7, torch.zeros(4, dtype=torch.float64)
    each = []
    for one in (0, 2, 3):  # class 1 has no images
        own, labels = features[y == one], y[y == one]
        ascent = autograd_gradient(weights, none, own, labels)[0]
        each.append(autograd_gradient(weights + rho * ascent / (ascent**2).sum() ** 0.5, none, own, labels)[0])
    torch.testing.assert_close(sharpness_aware_gradient(weights, features, y, rho), sum(each) / 3)


def test_a_gradient_of_zero_perturbs_nothing() -> None:
    weights, features = torch.zeros(1, 2), torch.ones(3, 2)
    found = sharpness_aware_gradient(weights, features, torch.zeros(3, dtype=torch.int64), 0.1)
    assert torch.equal(found, torch.zeros(1, 2))


def test_retrain_learns_from_features_of_adversarial_images(digits: ImageSet) -> None:
    case = case_of(digits)
    model = copy.deepcopy(case.model)
    found, labels = Retrain().features(case, model, model[5])
    x = torch.from_numpy(digits.images[case.train]).float() / 255
    y, index = torch.from_numpy(digits.labels[case.train]), torch.from_numpy(case.train)
    x_adv = PGD(eps="0.1", steps=10)(model, x, y, generator=ExampleNoise(case.seed, index))
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()[:5](x_adv)
    assert torch.equal(labels, y)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(Retrain().features(case_of(digits, batch_size=7), model, model[5])[0], found)


def test_retrain_reaches_the_optimum_of_logistic_regression() -> None:
    """On separable features, with 20, 10 and 20 images of the classes, whose weights are then balanced."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(K), [20, 10, 20])
    corners = np.array([[0.9, 0.1, 0.1, 0.5], [0.1, 0.9, 0.1, 0.5], [0.1, 0.1, 0.9, 0.5]])
    pixels = (corners[labels] + random.uniform(-0.1, 0.1, (50, 4))).astype(np.float32)
    images = ImageSet(name="corners", split="train", images=pixels.reshape(50, 1, 2, 2), labels=labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, K, bias=False))
    rows = np.arange(50)
    case = Case(model=model, images=images, train=rows, index=rows, threat=Threat.parse("1e-7"))
    decay = 0.01
    after = Retrain(epochs=400, lr=1.0, weight_decay=decay, batch_size=60)(case).model
    oracle = LogisticRegression(
        C=1 / (50 * decay), fit_intercept=False, class_weight="balanced", tol=1e-10, max_iter=10_000
    ).fit(pixels.astype(np.float64), labels)
    np.testing.assert_allclose(after[1].weight.detach().numpy(), oracle.coef_, atol=1e-4)
    assert (after(torch.from_numpy(images.images)).argmax(1).numpy() == labels).all()


def test_an_epoch_alternates_the_classes_and_repeats_the_small_ones() -> None:
    labels = torch.tensor([0] * 7 + [2] * 3 + [5] * 5)
    order = balanced_order(labels, torch.Generator().manual_seed(0))
    assert labels[order].tolist() == [0, 2, 5] * 7
    times = torch.bincount(order, minlength=len(labels))
    assert times[:7].tolist() == [1] * 7
    assert sorted(times[7:10].tolist()) == [2, 2, 3]
    assert sorted(times[10:].tolist()) == [1, 1, 1, 2, 2]


class Epochs(Progress):
    def __init__(self) -> None:
        self.seen: list[Epoch] = []

    def epoch(self, epoch: Epoch) -> None:
        self.seen.append(epoch)


@pytest.mark.parametrize("how", ["faal", "spectral"])
def test_finetune_trains_every_layer_for_two_epochs(how: Any, digits: ImageSet) -> None:
    told = Epochs()
    case = case_of(digits, progress=told)
    model = Finetune(how=how)(case).model
    assert [one.record["epoch"] for one in told.seen] == [1, 2]
    assert changed(case, model) >= {name for name, _ in case.model.named_parameters()}


def test_the_plan_of_faal(digits: ImageSet) -> None:
    case = case_of(digits, threat=Threat.parse("0.5", "L2"))
    plan = Finetune().plan(case)
    assert plan.objective == Madry(attack=PGD(eps="0.5", norm="L2", steps=10))
    assert plan.policy == FAAL(radius=0.5)
    assert [plan.optimizer.lr * plan.schedule(epoch, 2) for epoch in (0, 0.9, 1, 1.9)] == pytest.approx(
        [0.01, 0.01, 0.001, 0.001]
    )
    assert plan.awp is not None
    assert plan.awp.gamma == 0.005
    assert plan.train is case.train
    assert plan.validation is case.index
    assert Finetune(awp=0).plan(case).awp is None
    assert Finetune(lr=0.2).plan(case).optimizer.lr == 0.2


def test_images_without_validation_are_split_by_class(digits: ImageSet) -> None:
    whole = np.arange(len(digits))
    train, validation = split(case_of(digits, train=whole, index=whole.copy()))
    assert np.bincount(digits.labels[train]).tolist() == [32] * K
    assert np.bincount(digits.labels[validation]).tolist() == [8] * K
    assert sorted([*train, *validation]) == whole.tolist()
    assert split(case_of(digits, train=whole, index=whole, seed=4))[1].tolist() != validation.tolist()


def test_the_loss_of_spectral() -> None:
    """0.7 CE(x) + 6 KL(p(x) || p(x')) + 0.3 M[y, k'] CE(x'), example by example."""
    random = torch.Generator().manual_seed(0)
    x, x_adv = torch.randn(2, 8, K, 1, 1, generator=random).double()
    y, pairs = torch.arange(8) % K, torch.rand(K, K, generator=random).double()
    terms = Spectral(pairs=pairs).terms(nn.Flatten(), x, x_adv, y)
    for i in range(8):
        p, q = (torch.exp(z[i, :, 0, 0]) / torch.exp(z[i]).sum() for z in (x, x_adv))
        expected = -0.7 * p[y[i]].log() + 6 * (p * (p / q).log()).sum()
        expected += 0.3 * pairs[y[i], int(q.argmax())] * -q[y[i]].log()
        torch.testing.assert_close(terms.nat[i] + terms.beta * terms.adv[i], expected)


def test_pair_weights_follow_the_top_singular_vectors() -> None:
    confusion = torch.tensor([[50, 30, 20], [10, 80, 10], [5, 15, 80]])
    shares = np.array([[0, 0.3, 0.2], [0.1, 0, 0.1], [0.05, 0.15, 0]])
    # By power iteration, independently of a decomposition.
    v = np.ones(K)
    for _ in range(200):
        v = shares.T @ (shares @ v)
        v /= np.linalg.norm(v)
    outer = np.outer(shares @ v, v)
    expected = 0.01 + 2 * (outer - outer.min()) / (outer.max() - outer.min())
    np.testing.assert_allclose(pair_weights(confusion).numpy(), expected, rtol=1e-5)
    doubled = confusion * torch.tensor([[1], [2], [7]])  # more images of a class change no share
    torch.testing.assert_close(pair_weights(doubled), pair_weights(confusion))


def test_without_confusion_all_pairs_have_the_least_weight() -> None:
    assert torch.equal(pair_weights(torch.diag(torch.tensor([4, 0, 3]))), torch.full((K, K), 0.01))


def test_pair_weights_use_the_previous_epoch() -> None:
    pairs = torch.ones(K, K)
    objective, policy = Spectral(pairs=pairs), SpectralPairs(pairs=pairs)
    train, val = ClassStats.zeros(K), ClassStats.zeros(K)
    train.confusion_adv += torch.tensor([[5, 4, 1], [0, 9, 1], [1, 1, 8]])
    found: ClassControls | None = policy.on_epoch_end(train, val, 1)
    assert found is None
    assert torch.equal(objective.pairs, pair_weights(train.confusion_adv))
