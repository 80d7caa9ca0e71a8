from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.data import Batches, ImageSet, augment, materialize, ordered, to_float
from classwise.data.augment import random_parts, resample
from classwise.data.sources import Reading
from each import for_each


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(image: np.ndarray, top: int, left: int, mirror: bool, crop: int) -> np.ndarray:
    """Augment one image step by step: pad, crop, flip."""
    channels, height, width = image.shape
    padded = np.zeros((channels, height + 2 * crop, width + 2 * crop), image.dtype)
    padded[:, crop : crop + height, crop : crop + width] = image
    cut = padded[:, top : top + height, left : left + width]
    return cut[:, :, ::-1] if mirror else cut


@for_each("dtype", [np.uint8, np.float32])
@for_each("crop", [0, 1, 4])
@for_each("shape", [(3, 8, 8), (1, 5, 7)])
def test_augmentation_equals_naive_implementation(dtype, crop, shape):
    random = np.random.default_rng(crop)
    x = random.integers(1, 256, (50, *shape)).astype(dtype)
    top, left = random.integers(0, 2 * crop + 1, (2, 50))
    mirror = random.random(50) < 0.5
    found = augment(torch.from_numpy(x), *map(torch.from_numpy, (top, left, mirror)), crop)
    expected = np.stack([reference(*one, crop) for one in zip(x, top, left, mirror, strict=True)])
    assert found.numpy().dtype == dtype
    assert np.array_equal(found.numpy(), expected)


def test_epoch_yields_every_selected_example_once(make_set):
    images = make_set(40)
    rows = np.arange(3, 33)
    batches = Batches(images, rows, batch_size=8, device="cpu", generator=seeded())
    seen = list(batches)
    assert [len(y) for _, y, _ in seen] == [8, 8, 8, 6]
    assert len(batches) == 4
    x, y, index = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert sorted(index.tolist()) == rows.tolist()
    assert index.tolist() != rows.tolist()
    assert (x.dtype, y.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    assert y.tolist() == images.labels[index].tolist()
    assert torch.equal(x, to_float(images.images[index.numpy()]))


def test_drop_last(make_set):
    batches = Batches(make_set(20), None, batch_size=8, device="cpu", generator=seeded(), drop_last=True)
    assert len(batches) == 2
    assert [len(y) for _, y, _ in batches] == [8, 8]


def test_epochs_differ_and_seeds_reproduce(make_set):
    def epochs(seed: int, count: int = 2) -> list[torch.Tensor]:
        batches = Batches(make_set(30), None, batch_size=7, device="cpu", generator=seeded(seed), crop=1, flip=True)
        return [torch.cat([x for x, _, _ in batches]) for _ in range(count)]

    first, second = epochs(1)
    again = epochs(1)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, epochs(2, 1)[0])


def test_incomplete_epoch_leaves_the_generator_as_a_complete_one(make_set):
    states = []
    for stop in (True, False):
        generator = seeded()
        for _ in Batches(make_set(30), None, batch_size=7, device="cpu", generator=generator, crop=2, flip=True):
            if stop:
                break
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_crops_and_flips_are_uniform(make_set):
    # A bright pixel in the middle shows where the window was; its neighbor on the right, whether mirrored.
    image = np.zeros((900, 1, 5, 5), np.uint8)
    image[:, 0, 2, 2], image[:, 0, 2, 3] = 200, 100
    images = make_set(900, images=image, labels=np.zeros(900, int))
    batches = Batches(images, None, batch_size=900, device="cpu", generator=seeded(), crop=1, flip=True)
    (x, _, _), *_ = batches
    x = (x * 255).round().numpy()[:, 0]
    _, rows, columns = np.nonzero(x == 200)
    mirrored = np.nonzero(x == 100)[2] < columns
    for choices, share in ((rows, 1 / 3), (columns, 1 / 3)):
        assert np.abs(np.bincount(choices)[1:4] / 900 - share).max() < 0.06
    assert abs(mirrored.mean() - 0.5) < 0.06


def test_images_are_unchanged_without_augmentation(make_set):
    floats = np.random.default_rng(0).random((9, 2, 3, 3), dtype=np.float32)
    images = make_set(9, images=floats)
    for x, _, index in Batches(images, None, batch_size=4, device="cpu", generator=seeded()):
        assert np.array_equal(x.numpy(), floats[index.numpy()])


def test_sampling_draws_classes_by_weight_and_examples_evenly(make_set):
    labels = np.array([0] * 10 + [1] * 1000 + [3] * 2990)
    images = make_set(4000, (1, 1, 1), labels=labels, classes=tuple("abcde"))
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0])  # class 2 has no examples
    batches = Batches(images, None, batch_size=512, device="cpu", generator=seeded(), sampling=weights, drop_last=False)
    y = torch.cat([y for _, y, _ in batches])
    index = torch.cat([index for _, _, index in batches])
    assert len(y) == 4000
    share = torch.bincount(y, minlength=5) / 4000
    assert (share - torch.tensor([0.625, 0.375, 0, 0, 0])).abs().max() < 0.03
    tries = torch.bincount(index[index < 10], minlength=10) / 2500
    assert (tries - 0.1).abs().max() < 0.03
    batches.sampling = None
    assert sorted(torch.cat([index for _, _, index in batches]).tolist()) == list(range(4000))


def test_sampling_of_a_subset_keeps_labels_and_indices_together(make_set):
    images = make_set(30)
    batches = Batches(images, np.arange(5, 25), batch_size=6, device="cpu", generator=seeded(), sampling=torch.ones(3))
    for x, y, index in batches:
        assert y.tolist() == images.labels[index].tolist()
        assert ((index >= 5) & (index < 25)).all()
        assert torch.equal(x, to_float(images.images[index.numpy()]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 1.0], r"shape \(2,\); expected \(3,\) or longer"),
        ([[1.0, 1.0, 1.0]], "shape"),
        ([1.0, -1.0, 1.0], "nonnegative"),
        ([1.0, float("nan"), 1.0], "finite"),
        ([0.0, 0.0, 0.0, 1.0], "are zero for all classes with examples"),
    ],
)
def test_invalid_sampling_weights(make_set, weights, message):
    batches = Batches(make_set(), None, batch_size=4, device="cpu", generator=seeded())
    with pytest.raises(InputError, match=message):
        batches.sampling = torch.tensor(weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"crop": -1}, "crop = -1"),
        ({"crop": 1, "part": 0.5}, "part and crop are both given"),
        ({"size": 2}, "size = 2 without part"),
        ({"batch_size": 50, "drop_last": True}, "12 examples are fewer than the batch size 50"),
        ({"indices": [0, 12]}, r"indices are in 0\.\.12; expected 0\.\.11"),
        ({"indices": [-1]}, "indices are in -1"),
        ({"indices": []}, "no examples are selected"),
    ],
)
def test_invalid_batch_settings(make_set, options, message):
    settings = {"indices": None, "batch_size": 4, "device": "cpu", "generator": seeded(), **options}
    with pytest.raises(InputError, match=message):
        Batches(make_set(), settings.pop("indices"), **settings)


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1), st.booleans(), st.tuples(st.integers(2, 9), st.integers(2, 9)))
def test_random_crops_of_a_linear_image_are_linear(seed, smallest, mirrored, size):
    """On an image with linearly increasing values, interpolation is exact in the interior."""
    height, width = 13, 17
    parts = random_parts(torch.rand(4, 5, generator=seeded(seed)), smallest, height, width)
    top, left, tall, wide = (part[:, None].double() for part in parts)
    slope = lambda across, down: 0.01 * across + 0.03 * down  # noqa: E731
    columns, rows = torch.arange(width).double() + 0.5, torch.arange(height).double() + 0.5
    x = slope(columns[None, :], rows[:, None]).expand(5, 1, -1, -1)
    seen = resample(x, parts, torch.full((5,), mirrored), size)[:, 0]
    # The middle of each pixel lies at its share of the part; beyond the middle of the last pixel nothing rises.
    down = top + tall * (torch.arange(size[0]) + 0.5) / size[0]
    across = left + wide * (torch.arange(size[1]) + 0.5) / size[1]
    across = across.flip(1) if mirrored else across
    expected = slope(across.clamp(0.5, width - 0.5)[:, None, :], down.clamp(0.5, height - 0.5)[:, :, None])
    assert torch.allclose(seen, expected, atol=1e-6)


def test_random_crops_lie_in_the_image_with_correct_area_and_aspect_ratio():
    top, left, tall, wide = random_parts(torch.rand(4, 20000, generator=seeded()), 0.25, 40, 40)
    assert bool((top >= 0).all() and (left >= 0).all())
    assert bool((top + tall <= 40.0001).all() and (left + wide <= 40.0001).all())
    whole = (tall < 40) & (wide < 40)
    share, ratio = (tall * wide / 1600)[whole], (wide / tall)[whole]
    assert float(share.min()) > 0.2499
    assert float(ratio.min()) > 0.7499
    assert float(ratio.max()) < 1.3334
    small = share[share < 0.5]  # where no side is cut off, areas are uniform and long sides as many as tall ones
    assert abs(float(small.mean()) - 0.375) < 0.005
    assert abs(float((ratio > 1).double().mean()) - 0.5) < 0.02


def test_random_crops_have_the_given_size_and_are_reproducible(make_set):
    images = make_set(10, (3, 8, 12))
    options = {"batch_size": 4, "device": "cpu", "part": 0.3, "flip": True}
    first, again, whole = (
        torch.cat([x for x, _, _ in Batches(images, None, generator=seeded(), **options, **more)])
        for more in ({"size": 5}, {"size": 5}, {})
    )
    assert first.shape == (10, 3, 5, 5)
    assert whole.shape == (10, 3, 8, 12)
    assert torch.equal(first, again)
    assert 0 <= float(first.min()) < float(first.max()) <= 1


def test_full_crop_is_the_image():
    x = torch.rand(2, 3, 9, 6, generator=seeded())
    whole = torch.tensor([0.0, 0.0, 9.0, 6.0])[:, None].expand(4, 2)
    seen = resample(x, whole, torch.tensor([False, True]), (9, 6))
    assert torch.allclose(seen, torch.stack([x[0], x[1].flip(2)]), atol=1e-5)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_shares_of_all_processes_make_up_the_batches(n, size, processes, flip):
    rng = np.random.default_rng(n)
    images = ImageSet(
        name="some",
        split="train",
        images=rng.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8),
        labels=rng.integers(0, 3, n),
        classes=tuple("abc"),
    )
    options = {"batch_size": size, "device": "cpu", "crop": 2, "flip": flip}
    whole = list(Batches(images, None, generator=seeded(), **options))
    shares = [
        list(Batches(images, None, generator=seeded(), share=(i, processes), **options)) for i in range(processes)
    ]
    assert {len(share) for share in shares} == {len(whole)}
    for number, batch in enumerate(whole):
        for part, together in enumerate(batch):
            assert torch.equal(torch.cat([share[number][part] for share in shares]), together)
        sizes = [len(share[number][0]) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_ordered_takes_center_crops(make_set):
    images = make_set(3, (1, 7, 8))
    (x, _, _), *_ = ordered(images, None, 3, size=4)
    assert torch.equal(x, to_float(images.images[:, :, 1:5, 2:6]))
    with pytest.raises(InputError, match="the center crop of 9 pixels is larger than the images of 7x8"):
        next(ordered(images, None, 3, size=9))


def test_ordered_follows_the_indices(make_set):
    images = make_set(10)
    rows = [7, 2, 2, 9, 0]
    seen = list(ordered(images, rows, 2, "cpu", torch.float64))
    assert [len(y) for _, y, _ in seen] == [2, 2, 1]
    x, y, index = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert index.tolist() == rows
    assert y.tolist() == images.labels[rows].tolist()
    assert x.dtype == torch.float64
    assert torch.equal(x, to_float(images.images[rows]).double())
    assert torch.cat([index for _, _, index in ordered(images, None, 4)]).tolist() == list(range(10))


def test_memory_mapped_sets(make_set, monkeypatch):
    made = make_set(10)

    class Source:
        name, split = made.name, made.split

        def fingerprint(self) -> str:
            return "0"

        def open(self) -> Reading:
            return Reading(len(made), made.images.shape[1:], made.classes, [(made.images, made.labels)])

    mapped = materialize(Source())
    assert isinstance(mapped.images, np.memmap)
    batches = Batches(mapped, None, batch_size=10, device="cpu", generator=seeded())
    (x, _, index) = next(iter(batches))
    assert torch.equal(x, to_float(made.images[index.numpy()]))
    # Too large for the device, the same batches come from the disk.
    monkeypatch.setattr("classwise.data.batches.RESIDENT_BYTES", 100)
    settings = {"batch_size": 3, "device": "cpu", "crop": 1, "flip": True}
    for rows in (None, [8, 1, 5, 2, 9]):
        held = Batches(made, rows, generator=seeded(), **settings)
        read = Batches(mapped, rows, generator=seeded(), **settings)
        for one, other in zip(held, read, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    broken_off = iter(Batches(mapped, None, generator=seeded(), **settings))
    next(broken_off)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]
    broken_off.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]
    assert torch.equal(to_float(mapped.images), to_float(made.images))
    (x, _, _), *_ = ordered(mapped, None, 10)
    assert torch.equal(x, to_float(made.images))


def test_to_float_is_exact_division():
    values = np.arange(256, dtype=np.uint8)
    expected = values.astype(np.float32) / np.float32(255)
    assert np.array_equal(to_float(values).numpy(), expected)
    assert np.array_equal(to_float(torch.from_numpy(values)).numpy(), expected)
    floats = torch.rand(3)
    assert to_float(floats) is floats
    assert to_float(floats.double()).dtype == torch.float32
    assert to_float(values[::-1]).tolist() == expected[::-1].tolist()
    with pytest.raises(InputError, match=r"images are torch\.int64"):
        to_float(torch.arange(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_is_identical_and_does_not_synchronize(make_set):
    images = make_set(64, (3, 8, 8))
    options = {"batch_size": 10, "crop": 2, "flip": True}
    here = Batches(images, None, device="cpu", generator=seeded(), **options)
    there = Batches(images, None, device="cuda", generator=seeded(), **options)
    expected = list(here)
    walk = iter(there)
    found = [next(walk)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += list(walk)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b.cpu())
    values = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_float(values), to_float(values.cuda()).cpu())
    # A generator on the device itself works as well, with an order of its own.
    own = Batches(images, None, device="cuda", generator=torch.Generator("cuda").manual_seed(0), **options)
    assert sorted(torch.cat([index for _, _, index in own]).tolist()) == list(range(64))
