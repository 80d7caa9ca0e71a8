from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_files import encode, picture, write_shard
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from classwise.core.errors import InputError
from classwise.data import DATASETS, ImageSet, load_data
from each import for_each

X = np.random.default_rng(0).integers(0, 256, (7, 3, 6, 6), dtype=np.uint8)
Y = np.array([0, 1, 2, 0, 1, 2, 0])


def complaint(data, **options) -> str:
    with pytest.raises(InputError) as caught:
        load_data(data, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Items(Dataset):
    """A map-style data set; unlike a list it never raises IndexError."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index % len(self.items)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(torch.from_numpy(X), Y.tolist(), strict=True))


def dicts(image="image", label="label"):
    return Items([{image: Image.fromarray(x.transpose(1, 2, 0)), label: int(y)} for x, y in zip(X, Y, strict=True)])


DATA = {
    "image set": ImageSet(name="n", split="s", images=X, labels=Y),
    "arrays": (X, Y),
    "list": [X, Y.tolist()],
    "channels last": (X.transpose(0, 2, 3, 1), Y),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "int32 labels": (X, torch.from_numpy(Y).int()),
    "mapping": {"image": X, "label": Y},
    "tensor data set": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "tuples": Items([(torch.from_numpy(x), int(y), "more") for x, y in zip(X, Y, strict=True)]),
    "numpy channels last": Items([(x.transpose(1, 2, 0), np.int64(y)) for x, y in zip(X, Y, strict=True)]),
    "pictures": Items([(Image.fromarray(x.transpose(1, 2, 0)), torch.tensor(y)) for x, y in zip(X, Y, strict=True)]),
    "dicts": dicts(),
    "dicts img": dicts("img", "labels"),
    "pixel_values": dicts("pixel_values"),
    "subset": Subset(Items([*zip(X, Y, strict=True)] * 2), range(7)),
    "stream": Stream(),
    "loader": DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=3),
    "shuffled loader": DataLoader(
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=3, shuffle=True, drop_last=True
    ),
    "loader of dicts": DataLoader(Items([{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]), batch_size=2),
    "loader without batches": DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=None),
    "loader of a stream": DataLoader(Stream(), batch_size=4),
    "loader with a sampler": DataLoader(Items([*zip(X, Y, strict=True)] * 2), batch_size=4, sampler=range(7)),
}


@for_each("kind", DATA)
def test_accepts_every_kind_of_object(kind):
    found = load_data(DATA[kind])
    assert found.images.dtype == np.uint8
    assert np.array_equal(found.images, X)
    assert found.labels.tolist() == Y.tolist()
    assert found.labels.dtype == np.int64
    assert found.classes is None
    assert found.name


def test_custom_sampler_selects_examples():
    loader = DataLoader(Items([*zip(X, Y, strict=True)]), batch_size=2, sampler=SubsetRandomSampler([4]))
    assert load_data(loader).labels.tolist() == [1]
    some = DataLoader(DATA["tuples"], batch_size=2, sampler=RandomSampler(DATA["tuples"], num_samples=3))
    assert len(load_data(some)) == 3


def test_reading_a_loader_keeps_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for kind in ("shuffled loader", "loader of dicts", "loader"):
        load_data(DATA[kind])
    assert torch.equal(before, torch.get_rng_state())


def test_float_images_of_any_width_become_float32():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = load_data((torch.rand(3, 1, 4, 4).to(dtype), torch.zeros(3, dtype=torch.int64)))
        assert found.images.dtype == np.float32
    tensor = torch.rand(2, 1, 2, 2, requires_grad=True)
    assert np.array_equal(load_data((tensor, [0, 1])).images, tensor.detach().numpy())


def test_detection_of_channels_last():
    zeros = np.zeros
    assert load_data((zeros((2, 9, 8)), [0, 1])).images.shape == (2, 1, 9, 8)
    assert load_data((zeros((2, 9, 8, 1), np.uint8), [0, 1])).images.shape == (2, 1, 9, 8)
    assert load_data((zeros((2, 9, 8, 3)), [0, 1])).images.shape == (2, 3, 9, 8)
    assert load_data((zeros((2, 3, 8, 3), np.uint8), [0, 1])).images.shape == (2, 3, 8, 3)
    assert load_data((zeros((2, 64, 1, 1)), [0, 1])).images.shape == (2, 64, 1, 1)
    assert load_data((zeros((2, 2, 1, 3)), [0, 1])).images.shape == (2, 2, 1, 3)


def test_class_names():
    torchvision_like = Items([*zip(X, Y, strict=True)])
    torchvision_like.classes = ["a", "b", "c"]
    assert load_data(torchvision_like).classes == ("a", "b", "c")
    assert load_data(Subset(torchvision_like, [0, 3])).classes == ("a", "b", "c")
    assert load_data(DataLoader(torchvision_like)).classes == ("a", "b", "c")
    assert load_data(torchvision_like, classes=["x", "y", "z"]).classes == ("x", "y", "z")
    hub_like = dicts()
    hub_like.features = {"image": object(), "label": SimpleNamespace(names=["k", "l", "m"])}
    assert load_data(hub_like).classes == ("k", "l", "m")
    assert load_data(DATA["image set"], classes=("a", "b", "c")).classes == ("a", "b", "c")
    assert "label 2 at index 2; expected 0..1 (2 classes)" in complaint((X, Y), classes=["a", "b"])


def test_names_and_splits_of_objects():
    found = load_data((X, Y), split="train")
    assert (found.name, found.split) == ("arrays", "train")
    assert load_data(dicts()).name == "Items"
    assert load_data(DATA["loader of a stream"]).name == "Stream"


@for_each(
    ("data", "message"),
    [
        ((X, ["cat"] * 7), "labels are text or objects such as 'cat'"),
        (Items([(x, "cat") for x in X]), "labels are text or objects such as 'cat'"),
        (
            DataLoader(Items([(x, "cat") for x in X]), batch_size=7),
            "labels are text or objects such as 'cat'",
        ),
        ((X, Y.astype(float)), "labels are float64"),
        ((X, Y, Y), "data is a tuple of length 3; expected a pair (images, labels)"),
        ((X, Y[:3]), "7 images but 3 labels"),
        ((X, 3), "labels are a single number; expected an array of shape (N,)"),
        ((X.astype(float), Y), "divide by 255"),
        ((X.astype(int), Y), "images are int64"),
        (X, "data is an array without labels; expected a pair (images, labels)"),
        (torch.from_numpy(X), "data is an array without labels; expected a pair (images, labels)"),
        (Items([*X]), "example 0 has type ndarray; expected (image, label) or a dict with both"),
        ({"a": 1}, "has the keys a; expected one of image, img, pixel_values and one of label, labels"),
        (Items([{"image": X[0], "fine_label": 0}]), "example 0 has the keys image, fine_label"),
        (Items([(X[0], 0), (X[1, :, :4], 0)]), "example 0 has shape (3, 6, 6), example 1 has (3, 4, 6)"),
        (Items([]), "the data set is empty"),
        (DataLoader(Items([*zip(X[:0], Y[:0], strict=True)])), "the DataLoader is empty"),
        (Items([(Image.new("F", (4, 4)), 0)]), "example 0: pixels of mode 'F'"),
        ((([[1], [2, 3]]), Y), "images have different shapes"),
        (3, "data has type int; expected a spec, (images, labels), a Dataset or a DataLoader"),
        (None, "data has type NoneType"),
    ],
)
def test_invalid_objects_raise_one_line_errors(data, message):
    assert message in complaint(data)


def test_batches_of_different_shapes():
    loader = DataLoader(Items([(X[0], 0), (X[1, :, :4], 0)]), batch_size=1)
    assert "batch 0 has images of shape (3, 6, 6), batch 1 of (3, 4, 6)" in complaint(loader)


def test_specs(tmp_path):
    assert "unknown data set 'cifar01': did you mean 'cifar10'?" in complaint("cifar01")
    assert "unknown split of cifar10 'validation'" in complaint("cifar10", split="validation")
    assert "(known: test, train)" in complaint("digits", split="validation")
    assert complaint("digits", split=3) == "split must be a string such as 'test', got 3"
    assert complaint(str(tmp_path)) == f"data {str(tmp_path)!r} is a folder: use folder:{tmp_path}"
    assert "no such folder" in complaint("folder:nowhere")
    assert "unknown data set 'folder:'" in complaint("folder:")
    assert "unknown data set ''" in complaint("")
    assert "FILE.py:FACTORY" in complaint("cifar01")


def test_named_data_sets_are_cached(cache):
    first = load_data("digits", split="train")
    assert isinstance(first.images, np.memmap)
    assert (first.name, first.split, len(first)) == ("digits", "train", 1100)
    assert load_data("digits", classes=[f"digit {i}" for i in range(10)]).classes[3] == "digit 3"
    assert load_data("digits").classes[3] == "3"
    assert len(list(cache.iterdir())) == 2


def test_data_set_is_added_by_one_entry(card, mirror, monkeypatch):
    monkeypatch.setitem(DATASETS, "toy", card)
    write_shard(mirror / "org/toy/test-00000-of-00001.parquet", [encode(picture(0))], [1])
    assert load_data("toy").labels.tolist() == [1]
