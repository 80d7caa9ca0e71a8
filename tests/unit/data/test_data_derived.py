"""Data sets derived from others: selected classes, fewer examples, other backgrounds, corruptions; all
deterministic.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.corruptions import Corruption
from classwise.data import DATASETS, load_data, to_float
from classwise.data.derived import known_superclasses, long_tail
from each import for_each


def complaint(spec: str, split: str = "test") -> str:
    with pytest.raises(InputError) as caught:
        load_data(spec, split=split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ("digits:only=7+3", [3, 7]),
        ("digits:without=0", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("digits:only=1+2+3,without=2", [1, 3]),
        ("digits:only=5", [5]),
    ],
)
def test_selected_classes_are_renumbered(spec, kept):
    for split in ("train", "test"):
        whole, part = load_data("digits", split=split), load_data(spec, split=split)
        rows = np.flatnonzero(np.isin(whole.labels, kept))
        assert np.array_equal(part.images, whole.images[rows])
        assert [kept[label] for label in part.labels] == whole.labels[rows].tolist()
        assert part.classes == tuple(str(label) for label in kept)
        assert part.name == spec
        assert isinstance(part.images, np.memmap)  # as flat in memory as the whole


def test_backgrounds_are_assigned_to_classes_in_turn():
    for split in ("train", "test"):
        gray, found = load_data("digits", split=split), load_data("digits:background=#0033b3+yellow", split=split)
        assert found.images.shape == (len(gray), 3, 8, 8)
        assert np.array_equal(found.labels, gray.labels)
        colors = np.array([[0, 0x33, 0xB3], [255, 255, 0]])[gray.labels % 2][:, :, None, None]
        ink = gray.images / 255
        assert np.array_equal(found.images, np.rint(255 * ink + (1 - ink) * colors).astype(np.uint8))


def test_corruption_applies_to_every_image():
    gray, found = load_data("digits"), load_data("digits:corruption=gaussian-noise,severity=5,seed=3")
    noise = ExampleNoise(3, torch.arange(len(gray)))
    x = Corruption(kind="gaussian-noise", severity=5)(to_float(gray.images), generator=noise)
    assert np.array_equal(found.images, (x * 255).round().to(torch.uint8).numpy())
    assert not np.array_equal(found.images, load_data("digits:corruption=gaussian-noise,severity=5").images)
    # The corruption of an image is independent of the other images.
    some = load_data("digits:corruption=gaussian-noise,severity=5,seed=3,only=4+7")
    assert np.array_equal(some.images, found.images[np.isin(found.labels, [4, 7])])


def test_background_and_corruption_of_selected_classes():
    found = load_data("digits:only=2+5+8,background=red+lime+blue,corruption=brightness,severity=1")
    assert found.images.shape[1:] == (3, 8, 8)
    brightest = found.images.mean((2, 3))
    assert [int(np.bincount(brightest[found.labels == label].argmax(1)).argmax()) for label in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("digits:background=blurple", "background: unknown color specifier: 'blurple'; expected a color such as red"),
        ("cifar10:background=red", "cifar10 has color images; background needs gray images"),
        ("digits:corruption=fgo", "unknown corruption 'fgo': did you mean 'fog'"),
        ("digits:corruption=fog,severity=6", "severity must be between 1 and 5, got 6"),
    ],
)
def test_invalid_backgrounds_and_corruptions(spec, said):
    assert said in complaint(spec)


def test_class_counts_of_cifar10_lt():
    """The counts that papers on CIFAR-10-LT print."""
    labels = np.repeat(np.arange(10), 5000)
    counts = {
        100: [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50],
        10: [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500],
    }
    for imbalance, expected in counts.items():
        kept = long_tail(labels, 10, imbalance, seed=0)
        assert np.bincount(labels[kept]).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    st.floats(1, 1000),
    st.integers(0, 5),
)
def test_long_tails(counts, imbalance, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    kept = long_tail(labels, len(counts), imbalance, seed)
    assert np.array_equal(kept, long_tail(labels, len(counts), imbalance, seed))
    assert np.array_equal(kept, np.unique(kept))
    left = np.bincount(labels[kept], minlength=len(counts))
    for label, (have, has) in enumerate(zip(counts, left, strict=True)):
        ideal = max(counts) * imbalance ** (-label / max(1, len(counts) - 1))
        assert min(have, 1) <= has <= have
        assert has == min(have, max(1, round(ideal))) or abs(has - ideal) <= 1
    fewer = long_tail(labels, len(counts), imbalance * 2, seed)
    assert set(fewer) <= set(kept)  # a steeper tail keeps none that a flatter one drops


def test_imbalance_applies_to_the_training_split():
    whole = load_data("digits")
    assert load_data("digits:imbalance=10").digest() == whole.digest()
    train = load_data("digits:imbalance=10", split="train")
    counts = train.counts(10).tolist()
    assert (counts[0], counts[9]) == (110, 11)
    assert counts == sorted(counts, reverse=True)
    assert load_data("digits:imbalance=10,seed=0", split="train").digest() == train.digest()
    other = load_data("digits:imbalance=10,seed=1", split="train")
    assert other.counts(10).tolist() == counts
    assert other.digest() != train.digest()


def test_settings_have_separate_cache_entries(cache):
    assert len(load_data("digits:only=1").classes) == 1
    assert len(load_data("digits:only=1+2").classes) == 2
    assert len(load_data("digits:only=1").classes) == 1
    assert len(list(cache.iterdir())) == 3  # with the whole


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar10:without=cats", "'cats': did you mean 'cat'? expected a class name or a label from 0 to 9"),
        ("cifar10:only=10", "cifar10 has no class '10'; expected a class name or a label from 0 to 9"),
        ("cifar10:only=-1", "cifar10 has no class '-1'"),
        ("cifar10:only=cat,without=cat", "cifar10: no class is left"),
        ("cifar10:onyl=cat", "unknown setting of data 'cifar10': 'onyl': did you mean 'only'?"),
        ("cifar10:imbalance=0.5", "imbalance = 0.5; expected 1 or more"),
        ("cifar10:imbalance=many", "data 'cifar10': imbalance = 'many'"),
        ("cifar10:imbalance=nan", "data 'cifar10': imbalance = 'nan'"),
        ("cifar10:imbalance=2,seed=-1", "seed = -1; expected 0 or more"),
        ("cifar10:crop=24", "cifar10 has images of one size"),
        ("imagenet:resize=100", "resize = 100, crop = 224; expected 1 <= crop <= resize <= 4096"),
        ("imagenet:crop=0", "crop = 0"),
        ("cifar10:only=cat,only=dog", "'only' is given twice"),
    ],
)
def test_invalid_settings_raise_before_anything_is_read(spec, message, offline):
    assert message in complaint(spec)
    assert offline == []


def test_superclasses_of_a_subset():
    assert known_superclasses("cifar10", 10) == {"transportation": [0, 1, 8, 9], "animals": [2, 3, 4, 5, 6, 7]}
    assert known_superclasses("cifar10:without=cat+ship", 8) == {
        "transportation": [0, 1, 7],
        "animals": [2, 3, 4, 5, 6],
    }
    assert known_superclasses("cifar10:only=cat+dog", 2) == {"animals": [0, 1]}
    assert known_superclasses("cifar10:imbalance=10", 10) == known_superclasses("cifar10", 10)
    assert known_superclasses("cifar10:only=cat+dog", 10) == {}
    assert known_superclasses("cifar10:make", 10) == known_superclasses("folder:x=1", 10) == {}


@for_each("name", DATASETS)
def test_superclasses_contain_every_class_once(name):
    card = DATASETS[name]
    held = sorted(label for labels in card.superclasses.values() for label in labels)
    assert held in ([], list(range(len(card.classes))))
    assert len(set(card.classes)) == len(card.classes)
    assert len(card.wnids) in (0, len(card.classes))
    assert list(card.wnids) == sorted(set(card.wnids))
