"""The margin search against exact answers, and what its table predicts for any class biases.

On a linear model the smallest margin over the ball is z_y - z_j - eps |w_y - w_j| in the dual norm, as long as the box
does not cut the ball. On a small ReLU network a fine grid of the ball gives the minimum up to the grid spacing.
"""

# N examples, K classes, D pixels, G points of a grid

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.core.threat import Norm, Threat
from classwise.data import ImageSet
from classwise.evaluation.margins import MOST_TARGETS, MarginSettings, find_margins
from classwise.models import DigitsCNN
from classwise.models.heads import with_biases
from classwise.storage.margins import Margins

NORMS: tuple[Norm, ...] = ("Linf", "L2")
RADII: dict[Norm, str] = {"Linf": "0.1", "L2": "0.4"}
SHORT = MarginSettings(steps=4, more_steps=6)


def linear(pixels: int = 36, num_classes: int = 7, seed: int = 0) -> nn.Sequential:
    """A linear model with all logits zero on a gray image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(pixels, num_classes)
    with torch.no_grad():
        layer.bias.copy_(-0.5 * layer.weight.sum(1))
    return nn.Sequential(nn.Flatten(), layer)


def noise(
    size: int, shape: tuple[int, int, int] = (1, 6, 6), num_classes: int = 7, low: float = 0.45, high: float = 0.55
) -> ImageSet:
    """Images of random pixels."""
    random = np.random.default_rng(1)
    pixels = random.uniform(low, high, (size, *shape)).astype(np.float32)
    return ImageSet(name="noise", split="test", images=pixels, labels=np.arange(size) % num_classes)


def labeled_by(model: nn.Module, images: ImageSet) -> ImageSet:
    """The same images with the model's predictions as labels, except for every sixth."""
    with torch.no_grad():
        found = model(torch.from_numpy(images.images)).argmax(1).numpy()
    labels = np.where(np.arange(len(images)) % 6 == 5, images.labels, found)
    return ImageSet(name=images.name, split=images.split, images=images.images, labels=labels)


def exact_margins(model: nn.Sequential, images: ImageSet, threat: Threat | None) -> np.ndarray:
    """(N, K) smallest margins of a linear model over balls that lie within the box, infinite at the labels."""
    weight, bias = (part.detach().double().numpy() for part in (model[1].weight, model[1].bias))
    y = images.labels
    logits = images.images.reshape(len(y), -1).astype(np.float64) @ weight.T + bias
    margins = logits[np.arange(len(y)), y][:, None] - logits
    if threat is not None:
        rows = weight[y][:, None] - weight[None]
        dual = np.abs(rows).sum(2) if threat.norm == "Linf" else np.sqrt((rows**2).sum(2))
        margins -= threat.eps * dual
    margins[np.arange(len(y)), y] = np.inf
    return margins


def whole(images: ImageSet) -> np.ndarray:
    return np.arange(len(images))


def wrong(margins: Margins) -> np.ndarray:
    """(N, K) the columns of wrong classes."""
    found = np.ones(margins.attacked.shape, dtype=bool)
    found[np.arange(len(margins)), margins.label] = False
    return found


# -- exact answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_linear_models_are_exact(norm: Norm) -> None:
    model, images, threat = linear(), noise(60), Threat.parse(RADII[norm], norm)
    assert (images.images - threat.eps * (norm == "Linf") > 0).all()
    found = find_margins(model, images, whole(images), threat)
    exact = exact_margins(model, images, threat)
    assert (found.attacked[~wrong(found)] == np.inf).all()
    assert (exact[wrong(found)] < 0).any()
    np.testing.assert_allclose(found.attacked, exact, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.without_attack, exact_margins(model, images, None), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(found.label, images.labels)
    assert found.info["targets"] == 6


def test_pixels_at_the_bounds_of_the_box() -> None:
    """The box cuts the ball: the exact margin sums the remaining range of each pixel."""
    images, eps = noise(40, low=0.0, high=1.0), 0.3
    model = linear()
    found = find_margins(model, images, whole(images), Threat.parse(eps))
    weight = model[1].weight.detach().double().numpy()
    x = images.images.reshape(len(images), -1).astype(np.float64)
    rows = weight[images.labels][:, None] - weight[None]
    down, up = np.clip(x - eps, 0, 1) - x, np.clip(x + eps, 0, 1) - x
    moved = np.minimum(rows * down[:, None], rows * up[:, None]).sum(2)
    with np.errstate(invalid="ignore"):
        exact = exact_margins(model, images, None) + moved
    np.testing.assert_allclose(found.attacked, exact, rtol=1e-3, atol=1e-5)


class Folded(nn.Module):
    """A network of two layers with random weights, every fold of its ReLUs somewhere in the box."""

    def __init__(self, pixels: int, hidden: int, num_classes: int, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        folds, places = random.normal(size=(hidden, pixels)), random.uniform(size=(hidden, pixels))
        self.first, self.last = nn.Linear(pixels, hidden).double(), nn.Linear(hidden, num_classes).double()
        self.first.weight.data, self.first.bias.data = (
            torch.from_numpy(folds),
            torch.from_numpy(-(folds * places).sum(1)),
        )
        self.last.weight.data = torch.from_numpy(random.normal(size=(num_classes, hidden)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).relu())

    def steepest(self) -> np.ndarray:
        """(K, K, D) bounds of the slope of z_k - z_j in each pixel."""
        last, first = self.last.weight.detach(), self.first.weight.detach()
        return ((last[:, None] - last[None]).abs() @ first.abs()).numpy()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("pixels", "points"), [(2, 201), (3, 51)])
def test_margins_of_small_networks_match_a_grid_search(norm: Norm, pixels: int, points: int) -> None:
    """Margins are never below the minimum, and within 1% of the range in the ball for 9 of 10 images.

    The networks have random weights and many local minima, so gradients may miss the global one.
    """
    eps, num_classes = 0.15, 4
    steps = np.linspace(-eps, eps, points)
    grid = np.stack(np.meshgrid(*[steps] * pixels), -1).reshape(-1, pixels)  # (G, D)
    if norm == "L2":
        grid = grid[np.linalg.norm(grid, axis=1) <= eps]
    errors = []
    for seed in range(6):
        model = Folded(pixels, 8, num_classes, seed)
        images = noise(16, (1, 1, pixels), num_classes, 0.05, 0.95)
        found = find_margins(model, images, whole(images), Threat.parse(eps, norm))
        for row, label in enumerate(images.labels):
            points_of_ball = np.clip(images.images[row].reshape(1, -1) + grid, 0, 1)
            with torch.no_grad():
                logits = model(torch.from_numpy(points_of_ball)).numpy()
            margins = logits[:, [label]] - logits
            low, high = margins.min(axis=0), margins.max(axis=0)
            # Between neighbors of the grid a margin falls by no more than its slopes times the width of a mesh; on
            # the surface of a round ball the nearest point of the grid is within that width too.
            finer = model.steepest()[label].sum(axis=1) * (steps[1] - steps[0])
            for other in set(range(num_classes)) - {int(label)}:
                value = found.attacked[row, other]
                assert value >= low[other] - finer[other] - 1e-6
                errors.append((value - low[other]) / (high[other] - low[other]))
    assert np.mean(np.array(errors) < 0.01) > 0.9
    assert np.median(errors) < 1e-3


# -- what the table predicts ------------------------------------------------------------------------------


def shares(kept: np.ndarray, label: np.ndarray, num_classes: int) -> list[float]:
    """The accuracy of each class in percent."""
    return [100 * float(kept[label == one].mean()) for one in range(num_classes)]


@pytest.mark.parametrize("norm", NORMS)
def test_margins_predict_the_effect_of_class_biases(norm: Norm) -> None:
    """For several random biases: by closed form, and by an attack on the model that has them in its last layer."""
    model, num_classes = linear(num_classes=4), 4
    images = labeled_by(model, noise(160, num_classes=4, low=0.2, high=0.8))
    threat = Threat.parse({"Linf": "0.02", "L2": "0.1"}[norm], norm)
    table = find_margins(model, images, whole(images), threat)
    exact = {"natural": exact_margins(model, images, None), "robust": exact_margins(model, images, threat)}
    x, y = torch.from_numpy(images.images), torch.from_numpy(images.labels)
    random = np.random.default_rng(3)
    seen = set()
    for _ in range(4):
        biases = random.normal(0, 0.15, num_classes).astype(np.float32)
        shift = biases[images.labels][:, None] - biases[None]
        predicted = {
            "natural": (table.without_attack + shift).min(axis=1) > 0,
            "robust": (table.attacked + shift).min(axis=1) > 0,
        }
        for kind, margins in exact.items():
            np.testing.assert_array_equal(predicted[kind], (margins + shift).min(axis=1) > 0)
        changed, layer = with_biases(model, torch.from_numpy(biases), x)
        assert layer == "1"
        report = cw.evaluate(changed, (x, y), attacks=["cw-pgd:steps=50"], eps=threat.text, norm=norm)
        for key, kind in (("natural", "natural"), ("cw-pgd", "robust")):
            expected = shares(predicted[kind], images.labels, num_classes)
            assert [part.value for part in report[key].by_class] == pytest.approx(expected, abs=1e-3)
        seen.add(int(predicted["robust"].sum()))
    assert len(seen) > 2  # the biases change the accuracy


def test_fewer_targets_give_upper_bounds() -> None:
    model, images, threat = linear(), noise(50), Threat.parse("0.1")
    every = find_margins(model, images, whole(images), threat)
    few = find_margins(model, images, whole(images), threat, settings=MarginSettings(targets=2))
    assert few.info["targets"] == 2
    columns = wrong(few)
    assert (few.attacked[~columns] == np.inf).all()
    assert (few.attacked[columns] >= every.attacked[columns] - 1e-5).all()
    assert (few.attacked[columns] <= few.without_attack[columns] + 1e-5).all()
    # The two likeliest wrong classes of each image were attacked, and the others were not.
    natural = exact_margins(model, images, None)
    likeliest = np.zeros_like(columns)
    likeliest[np.arange(len(images))[:, None], natural.argsort(axis=1)[:, :2]] = True
    np.testing.assert_allclose(few.attacked[likeliest], every.attacked[likeliest], rtol=1e-3, atol=1e-6)
    assert (few.attacked > every.attacked + 0.01)[columns & ~likeliest].any()


def test_audit_of_fewer_targets() -> None:
    """The audit counts images that survive with one target but are broken by another; fewer than 64 are all audited.

    The logit of class 6 changes most, and is often not the second largest.
    """
    model = linear()
    with torch.no_grad():
        model[1].weight[6] *= 4
        model[1].bias[6] *= 4
    images, threat = labeled_by(model, noise(60, low=0.3, high=0.7)), Threat.parse("0.02")
    exact = exact_margins(model, images, threat).min(axis=1)
    found = find_margins(model, images, whole(images), threat, settings=MarginSettings(targets=1))
    robust = found.attacked.min(axis=1) > 0
    audit = found.info["audit"]
    assert audit["images"] == robust.sum() < 64
    assert audit["broken"] == (exact[robust] <= 0).sum() > 0
    assert audit["at_most"] > 100 * audit["broken"] / audit["images"]
    again = find_margins(model, images, whole(images), threat, settings=MarginSettings(targets=1), batch_size=7)
    assert again.info["audit"] == audit
    assert "audit" not in find_margins(model, images, whole(images), threat).info


def test_number_of_targets_for_many_classes() -> None:
    assert MarginSettings().chosen(4) == 3
    assert MarginSettings().chosen(MOST_TARGETS + 1) == MOST_TARGETS
    assert MarginSettings().chosen(200) == MOST_TARGETS
    assert MarginSettings(targets=150).chosen(200) == 150


# -- files and batches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """In double precision, so that the batch does not change how sums are rounded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return DigitsCNN(num_classes=5).double()


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return noise(48, (1, 8, 8), 5, 0.0, 1.0)


THREAT = Threat.parse("0.1")


def search(model: nn.Module, images: ImageSet, **more: Any) -> Margins:
    given = {"index": whole(images), "threat": THREAT, "settings": SHORT, **more}
    return find_margins(model, images, **given)


def same(first: Margins, second: Margins) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name), equal_nan=True)
        for name in ("index", "label", "natural", "attacked")
    )


def test_batch_size_does_not_change_margins(net: nn.Module, images: ImageSet) -> None:
    first = search(net, images, batch_size=5)
    assert same(first, search(net, images, batch_size=48))
    assert same(first, search(net, images))
    assert not same(first, search(net, images, settings=MarginSettings(steps=4, more_steps=6, seed=1)))


def test_order_of_examples_does_not_change_margins(net: nn.Module, images: ImageSet) -> None:
    """Noise depends on the image index, so a subset of images gives a subset of the table."""
    rows = np.array([30, 4, 17])
    assert same(search(net, images, index=rows), search(net, images).take(rows))


class Counting(Progress):
    """Records the numbers of remaining examples."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.left.append(total - done)


def test_an_interrupted_search_continues(
    net: nn.Module, images: ImageSet, tmp_path: Path, stop_after: Callable[[int], Progress]
) -> None:
    file = tmp_path / "margins.parquet"
    with pytest.raises(KeyboardInterrupt):
        search(net, images, file=file, batch_size=8, progress=stop_after(20))
    half = Margins.load(file)
    assert 0 < int(half.missing.sum()) < len(images)
    told = Counting()
    ended = search(net, images, file=file, batch_size=16, progress=told)
    assert told.left == [int(half.missing.sum())]
    assert same(ended, search(net, images, file=tmp_path / "straight.parquet"))
    assert same(ended, Margins.load(file))
    again = Counting()
    assert same(search(net, images, file=file, progress=again), ended)
    assert again.left == []


def test_interrupted_audit_is_repeated(
    net: nn.Module, images: ImageSet, tmp_path: Path, stop_after: Callable[[int], Progress]
) -> None:
    file, few = tmp_path / "margins.parquet", MarginSettings(steps=4, more_steps=6, targets=2)
    easy = Threat.parse("0.0001")  # leaves images to audit
    with torch.no_grad():
        label = net(torch.from_numpy(images.images).double()).argmax(1).numpy()
    images = ImageSet(name="noise", split="test", images=images.images, labels=label)
    with pytest.raises(KeyboardInterrupt):
        search(net, images, file=file, settings=few, threat=easy, progress=stop_after(len(images)))
    assert Margins.load(file).complete
    ended = search(net, images, file=file, settings=few, threat=easy)
    straight = search(net, images, file=tmp_path / "straight.parquet", settings=few, threat=easy)
    assert same(ended, straight)
    assert ended.info == straight.info == Margins.load(file).info
    assert ended.info["audit"]["images"] > 0


def test_saved_table_has_half_precision(net: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    kept, plain = search(net, images, file=tmp_path / "m.parquet"), search(net, images)
    np.testing.assert_array_equal(kept.attacked, plain.attacked.astype(np.float16).astype(np.float32))
    assert kept.info == plain.info


@pytest.mark.parametrize("change", ["weights", "eps", "norm", "targets", "steps", "seed", "images", "examples"])
def test_table_of_another_search_is_replaced(net: nn.Module, images: ImageSet, change: str, tmp_path: Path) -> None:
    file = tmp_path / "margins.parquet"
    search(net, images, file=file)
    model, given = net, {}
    if change == "weights":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = DigitsCNN(num_classes=5).double()
    elif change == "images":
        images = ImageSet(name="noise", split="test", images=1 - images.images, labels=images.labels)
    else:
        given = {
            "eps": {"threat": Threat.parse("0.05")},
            "norm": {"threat": Threat.parse("0.1", "L2")},
            "targets": {"settings": MarginSettings(steps=4, more_steps=6, targets=2)},
            "steps": {"settings": MarginSettings(steps=5, more_steps=6)},
            "seed": {"settings": MarginSettings(steps=4, more_steps=6, seed=1)},
            "examples": {"index": np.arange(30)},
        }[change]
    told = Counting()
    found = search(model, images, file=file, progress=told, **given)
    assert told.left == [len(found)]
    assert same(found, Margins.load(file))
    assert Margins.load(file).info["fingerprint"] == found.info["fingerprint"]
    assert same(found, search(model, images, file=tmp_path / "new.parquet", **given))


def test_known_table_is_reused(
    net: nn.Module, images: ImageSet, tmp_path: Path, stop_after: Callable[[int], Progress]
) -> None:
    known, file = tmp_path / "known.parquet", tmp_path / "own.parquet"
    expected = search(net, images, file=known)
    before = known.read_bytes()
    told = Counting()
    assert same(search(net, images, known=known, progress=told), expected)
    assert not file.exists()
    assert same(search(net, images, file=file, known=known, progress=told), expected)
    assert same(Margins.load(file), expected)
    file.unlink()
    with pytest.raises(KeyboardInterrupt):
        search(net, images, file=file, batch_size=8, progress=stop_after(20))
    assert same(search(net, images, file=file, known=known, progress=told), expected)
    assert same(Margins.load(file), expected)  # and not the half of it
    search(net, images, file=file, threat=Threat.parse("0.02"))
    assert same(search(net, images, file=file, known=known, progress=told), expected)
    assert same(Margins.load(file), expected)  # and not that of another radius
    assert told.left == []
    assert known.read_bytes() == before


def test_more_complete_of_two_tables_is_continued(
    net: nn.Module, images: ImageSet, tmp_path: Path, stop_after: Callable[[int], Progress]
) -> None:
    known, file = tmp_path / "known.parquet", tmp_path / "own.parquet"
    for path, amount in ((known, 7), (file, 30)):
        with pytest.raises(KeyboardInterrupt):
            search(net, images, file=path, batch_size=8, progress=stop_after(amount))
    fewest = min(int(Margins.load(path).missing.sum()) for path in (known, file))
    told = Counting()
    search(net, images, file=file, known=known, progress=told)
    assert told.left == [fewest]


def test_no_examples(net: nn.Module, images: ImageSet) -> None:
    found = search(net, images, index=np.zeros(0, dtype=np.int64))
    assert (len(found), found.num_classes, found.complete) == (0, 5, True)


# -- what is refused --------------------------------------------------------------------------------------


def complaint(model: nn.Module, images: ImageSet, **more: Any) -> str:
    """Return the one-line error of a search."""
    with pytest.raises(InputError) as caught:
        search(model, images, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Broken(nn.Module):
    """A model whose logits become NaN where a pixel is large."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return torch.where(x.flatten(1).amax(1, keepdim=True) > 0.54, torch.nan, logits)


class Small(nn.Module):
    """A model for which memory holds a few images only."""

    def __init__(self, model: nn.Module, most: int) -> None:
        super().__init__()
        self.model, self.most = model, most
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        self.sizes.append(len(x))
        return self.model(x)


def test_probabilities_are_refused() -> None:
    model, images = linear(), noise(30)
    said = complaint(nn.Sequential(*model, nn.Softmax(dim=1)), images)
    assert said.startswith("the model returns probabilities, not logits")
    # Positive logits that do not sum to one are logits, and so are log-probabilities.
    for last in (nn.Softplus(), nn.LogSoftmax(dim=1)):
        assert search(nn.Sequential(*model, last), images).complete


def test_models_without_gradients_are_refused() -> None:
    model = linear()
    model.has_gradients = False
    assert "the margin search needs gradients, but the model has none" in complaint(model, noise(14))


def test_logits_that_are_not_finite_are_refused() -> None:
    assert "NaN or infinite logits" in complaint(Broken(linear()), noise(14, low=0.5, high=0.6))
    # The attack reaches them although the images do not.
    assert "NaN or infinite logits" in complaint(Broken(linear()), noise(14, low=0.45, high=0.5))


@pytest.mark.parametrize("targets", [0, -1, 7, 100])
def test_targets_out_of_range_are_refused(targets: int) -> None:
    said = complaint(linear(), noise(14), settings=MarginSettings(targets=targets))
    assert said == f"targets must be between 1 and 6, got {targets}"


def test_models_and_data_of_different_classes_are_refused() -> None:
    said = complaint(linear(num_classes=3), noise(14))
    assert "label 6 is out of range: the model has 3 outputs, so labels must be 0 to 2" in said


@pytest.mark.parametrize("most", [10, 15])
def test_batch_size_shrinks_to_fit_memory(net: nn.Module, images: ImageSet, most: int) -> None:
    model, few = Small(net, most), MarginSettings(steps=4, more_steps=6, targets=2)
    found = search(model, images, batch_size=32, settings=few, threat=Threat.parse("0.001"))
    expected = search(net, images, settings=few, threat=Threat.parse("0.001"))
    assert same(found, expected)
    assert found.info["audit"] == expected.info["audit"]
    assert max(model.sizes) <= most


def test_out_of_memory_at_batch_size_one_is_refused(net: nn.Module, images: ImageSet) -> None:
    class Full(Small):
        """A model for which memory suffices for natural images but not for attacked ones."""

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 0).any()):
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return super().forward(x)

    black = ImageSet(name="noise", split="test", images=0 * images.images, labels=images.labels)
    said = complaint(Full(net, 50), black, batch_size=4)
    assert said == "margins of 48 images of noise/test: out of memory at batch size 1"


def test_model_is_not_changed(images: ImageSet) -> None:
    model = DigitsCNN(num_classes=5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    search(model, images)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
