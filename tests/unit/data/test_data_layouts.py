"""Every published layout against files written byte by byte, by name and as a folder; and damaged ones."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.io
import torch
from data_files import claimed, encode, picture, write_shard
from layout_files import (
    random_images,
    save_image,
    write_cifar_binary,
    write_cifar_python,
    write_idx,
    write_stl10,
    write_svhn,
    write_tiny_imagenet,
)
from PIL import Image

from classwise.analysis.image_folders import write_image_folder
from classwise.core.errors import InputError
from classwise.data import DATASETS, load_data
from classwise.data.decode import cropped
from classwise.data.layouts import LAYOUTS
from classwise.data.load import prepare

CIFAR = random_images(50, (3, 32, 32))
GRAY = random_images(7, (1, 28, 28))
LABELS = [i * 7 % 10 for i in range(50)]
FINE = [i * 31 % 100 for i in range(50)]


def complaint(data: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        load_data(data, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cifar10_binary(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    for i in range(5):
        part = slice(8 * i, 8 * i + 8)
        write_cifar_binary(folder / f"data_batch_{i + 1}.bin", CIFAR[part], LABELS[part])
    write_cifar_binary(folder / "test_batch.bin", CIFAR[40:], LABELS[40:])


def cifar10_python(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    for i in range(5):
        part = slice(8 * i, 8 * i + 8)
        write_cifar_python(folder / f"data_batch_{i + 1}", CIFAR[part], LABELS[part], b"labels", protocol=i)
    write_cifar_python(folder / "test_batch", CIFAR[40:], LABELS[40:], b"labels", protocol=4)
    (folder / "batches.meta").write_bytes(b"")


def cifar100_binary(root: Path) -> None:
    folder = root / "cifar-100-binary"
    write_cifar_binary(folder / "train.bin", CIFAR[:40], FINE[:40], [19] * 40)
    write_cifar_binary(folder / "test.bin", CIFAR[40:], FINE[40:], [3] * 10)


def cifar100_python(root: Path) -> None:
    folder = root / "cifar-100-python"
    write_cifar_python(folder / "train", CIFAR[:40], FINE[:40], b"fine_labels")
    write_cifar_python(folder / "test", CIFAR[40:], FINE[40:], b"fine_labels")
    (folder / "meta").write_bytes(b"")


def svhn(root: Path) -> None:
    write_svhn(root / "svhn" / "train_32x32.mat", CIFAR[:40], LABELS[:40])
    write_svhn(root / "svhn" / "test_32x32.mat", CIFAR[40:], LABELS[40:])


SETS = {
    "cifar10 binary": ("cifar10", cifar10_binary, "cifar-10-batches-bin", LABELS),
    "cifar10 python": ("cifar10", cifar10_python, "cifar-10-batches-py", LABELS),
    "cifar100 binary": ("cifar100", cifar100_binary, "cifar-100-binary", FINE),
    "cifar100 python": ("cifar100", cifar100_python, "cifar-100-python", FINE),
    "svhn": ("svhn", svhn, "svhn", LABELS),
}


@pytest.mark.parametrize("kind", SETS)
def test_small_color_images(kind, mirror):
    name, write, folder, labels = SETS[kind]
    write(mirror)
    for spec in (name, f"folder:{mirror / folder}"):
        train, test = load_data(spec, split="train"), load_data(spec, split="test")
        assert np.array_equal(train.images, CIFAR[:40])
        assert np.array_equal(test.images, CIFAR[40:])
        assert [*train.labels, *test.labels] == labels
        assert train.classes == test.classes == DATASETS[name].classes
        assert train.name == spec


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
def test_idx(name, folder, suffix, mirror):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = GRAY if split == "train" else GRAY[:3]
        write_idx(mirror / folder / f"{prefix}-images-idx3-ubyte{suffix}", images[:, 0])
        write_idx(mirror / folder / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(len(images), dtype=np.uint8))
    for spec in (name, f"folder:{mirror / folder}"):
        train, test = load_data(spec, split="train"), load_data(spec, split="test")
        assert np.array_equal(train.images, GRAY)
        assert np.array_equal(test.images, GRAY[:3])
        assert train.labels.tolist() == list(range(7))
    assert load_data(name).classes == DATASETS[name].classes
    assert load_data(f"folder:{mirror / folder}").classes == tuple("0123456789")  # file names are ambiguous


def test_unpacked_idx_file_is_preferred_to_its_archive(tmp_path):
    for name, values in (("t10k-images-idx3-ubyte", GRAY[:, 0]), ("t10k-labels-idx1-ubyte", np.zeros(7, np.uint8))):
        write_idx(tmp_path / name, values)
        (tmp_path / f"{name}.gz").write_bytes(b"damaged")
    assert np.array_equal(load_data(f"folder:{tmp_path}").images, GRAY)


def test_stl10_is_column_major(mirror):
    images = random_images(4, (3, 96, 96))
    write_stl10(mirror / "stl10_binary", "train", images[:3], [0, 9, 4])
    write_stl10(mirror / "stl10_binary", "test", images[3:], [7])
    for spec in ("stl10", f"folder:{mirror / 'stl10_binary'}"):
        train, test = load_data(spec, split="train"), load_data(spec, split="test")
        assert np.array_equal(train.images, images[:3])
        assert np.array_equal(test.images, images[3:])
        assert train.labels.tolist() == [0, 9, 4]
        assert test.labels.tolist() == [7]
        assert test.classes[7] == "monkey"


def test_parts_are_concatenated_correctly(mirror, monkeypatch):
    """For any number of images per chunk."""
    images = random_images(5, (3, 96, 96))
    write_stl10(mirror / "stl10_binary", "test", images, [0, 1, 2, 3, 4])
    cifar10_binary(mirror)
    write_idx(mirror / "MNIST/raw/t10k-images-idx3-ubyte", GRAY[:, 0])
    write_idx(mirror / "MNIST/raw/t10k-labels-idx1-ubyte", np.arange(7, dtype=np.uint8))
    monkeypatch.setattr("classwise.data.decode.PART_ROWS", 3)
    assert np.array_equal(load_data("stl10").images, images)
    assert np.array_equal(load_data("cifar10", split="train").images, CIFAR[:40])
    found = load_data("mnist")
    assert np.array_equal(found.images, GRAY)
    assert found.labels.tolist() == list(range(7))


WNIDS = ["n02124075", "n01443537", "n12267677"]


def test_tiny_imagenet_tree(mirror):
    train, val = random_images(3, (3, 64, 64)), random_images(3, (3, 64, 64), seed=1)
    folder = mirror / "tiny-imagenet-200"
    write_tiny_imagenet(folder, WNIDS, train, val)
    card = DATASETS["tiny-imagenet"]
    named, own = load_data("tiny-imagenet", split="train"), load_data(f"folder:{folder}", split="train")
    assert own.classes == ("goldfish", "Egyptian cat", "acorn")  # as sorted ids, not as in wnids.txt
    assert own.labels.tolist() == [0, 1, 2]
    assert np.array_equal(own.images, train[[1, 0, 2]])
    assert named.classes == card.classes
    assert [named.classes[label] for label in named.labels] == ["goldfish", "Egyptian cat", "acorn"]
    named, own = load_data("tiny-imagenet"), load_data(f"folder:{folder}")
    assert np.array_equal(own.images, val)  # in the order of the annotations
    assert own.labels.tolist() == [1, 0, 2]
    assert [card.wnids[label] for label in named.labels] == WNIDS


def test_tiny_imagenet_validation_in_class_folders(tmp_path):
    """The validation images in the layout that a widely used script produces."""
    val = random_images(3, (3, 64, 64), seed=1)
    write_tiny_imagenet(tmp_path, WNIDS, random_images(3, (3, 64, 64)), val)
    for i, wnid in enumerate(WNIDS):
        (tmp_path / "val" / wnid / "images").mkdir(parents=True)
        (tmp_path / "val" / "images" / f"val_{i}.JPEG").rename(tmp_path / "val" / wnid / "images" / f"val_{i}.JPEG")
    (tmp_path / "val" / "images").rmdir()
    found = load_data(f"folder:{tmp_path}")
    assert np.array_equal(found.images, val[[1, 0, 2]])
    assert found.labels.tolist() == [0, 1, 2]


def test_invalid_tiny_imagenet_annotations(tmp_path):
    write_tiny_imagenet(tmp_path, WNIDS, random_images(3, (3, 64, 64)), random_images(3, (3, 64, 64)))
    notes = tmp_path / "val" / "val_annotations.txt"
    elsewhere = "../../train/n01443537/images/n01443537_0.JPEG\tn01443537"
    for line in (elsewhere, "val_0.JPEG", "absent.JPEG\tn01443537"):
        notes.write_text(line + "\n")
        assert "is not an image in" in complaint(f"folder:{tmp_path}")
    notes.write_text("val_0.JPEG\tn00000000\n")
    assert "'n00000000' is not a class of" in complaint(f"folder:{tmp_path}")
    notes.write_bytes(b"\xff\xfe")
    assert "cannot be read: UnicodeDecodeError" in complaint(f"folder:{tmp_path}")
    notes.unlink()
    assert "val_annotations.txt is missing" in complaint(f"folder:{tmp_path}")
    shutil.rmtree(tmp_path / "train")
    assert "no images of the split train" in complaint(f"folder:{tmp_path}", split="train")


def imagenet(root: Path, sizes: dict[str, list[tuple[int, int]]]) -> dict[str, np.ndarray]:
    """A tree ``split/<id>/*.JPEG`` with images of given heights and widths; returns them by path."""
    found = {}
    for place, wanted in sizes.items():
        for i, size in enumerate(wanted):
            image = random_images(1, (3, *size), seed=len(found))[0]
            save_image(root / place / f"{i}.JPEG", image)
            found[f"{place}/{i}.JPEG"] = image
    return found


def test_imagenet_tree(mirror):
    held = imagenet(
        mirror / "ILSVRC2012",
        {
            "train/n01440764": [(300, 400), (256, 256)],
            "train/n15075141": [(500, 333)],
            "val/n15075141": [(260, 700)],
        },
    )
    train, test = load_data("imagenet", split="train"), load_data("imagenet")
    assert train.images.shape == (3, 3, 224, 224)
    assert train.labels.tolist() == [0, 0, 999]
    assert test.labels.tolist() == [999]
    assert (len(test.classes), test.classes[0], test.classes[999]) == (1000, "tench", "toilet tissue")
    center = held["train/n01440764/1.JPEG"][:, 16:240, 16:240]
    assert np.array_equal(train.images[1], center)  # the shorter side is 256 already
    small = load_data("imagenet:resize=160,crop=128", split="train")
    assert small.images.shape == (3, 3, 128, 128)
    assert small.name == "imagenet:resize=160,crop=128"
    own = load_data(f"folder:{mirror / 'ILSVRC2012'}", split="train")
    assert own.classes == ("tench", "toilet tissue")
    assert own.labels.tolist() == [0, 0, 1]
    assert np.array_equal(own.images, train.images)


def test_images_of_one_size_are_not_resized(tmp_path):
    held = imagenet(
        tmp_path, {"train/n01440764": [(64, 64)], "val/n01440764": [(64, 64)] * 2, "val/n99999999": [(64, 64)]}
    )
    found = load_data(f"folder:{tmp_path}")
    assert np.array_equal(found.images[0], held["val/n01440764/0.JPEG"])
    assert found.classes == ("tench", "n99999999")
    assert found.labels.tolist() == [0, 0, 1]


def test_incomplete_imagenet_trees(tmp_path, mirror, offline):
    imagenet(tmp_path, {"train/n01440764": [(30, 40), (50, 60)]})
    save_image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG", random_images(1, (3, 30, 40))[0])
    shutil.copytree(tmp_path / "val", mirror / "imagenet" / "val")  # without a train folder beside it
    for spec in (f"folder:{tmp_path}", "imagenet"):
        assert "val contains images without class folders: move each to val/<WordNet id>/" in complaint(spec)
    assert load_data(f"folder:{tmp_path}", split="train").classes == ("tench",)
    shutil.rmtree(mirror / "imagenet")
    shutil.rmtree(tmp_path / "val")
    assert "no folder for the split test; found train" in complaint(f"folder:{tmp_path}")
    imagenet(mirror / "imagenet", {"train/n99999999": [(300, 300)]})
    assert "'n99999999' is not a class of imagenet" in complaint("imagenet", split="train")
    (mirror / "imagenet" / "train" / "n99999999" / "0.JPEG").unlink()
    assert "cannot download ILSVRC/imagenet-1k" in complaint("imagenet", split="train")


@pytest.mark.parametrize("size", [(256, 256), (300, 401), (1003, 257), (97, 5000), (31, 29), (224, 225)])
def test_crop_equals_torchvision(size):
    """Compare with Pillow's resized image, cropped as in torchvision."""
    image = picture(3, size)
    width, height = image.size
    if width <= height:
        resized = image.resize((256, int(256 * height / width)), Image.Resampling.BILINEAR)
    else:
        resized = image.resize((int(256 * width / height), 256), Image.Resampling.BILINEAR)
    top, left = round((resized.height - 224) / 2.0), round((resized.width - 224) / 2.0)
    expected = np.asarray(resized)[top : top + 224, left : left + 224]
    assert np.array_equal(cropped(image, "RGB", (224, 224), 256), expected)


def test_extreme_aspect_ratio_is_refused(tmp_path):
    imagenet(tmp_path, {"val/n01440764": [(30, 40), (1, 2**20)]})
    assert "1048576x1 pixels; the aspect ratio is too extreme to be resized" in complaint(f"folder:{tmp_path}")


def test_class_ids_in_parquet_files_are_used(mirror):
    card = DATASETS["tiny-imagenet"]
    order = [*card.wnids[5:], "n08742578", *card.wnids[:4]]
    path = mirror / card.hub / "data" / "valid-00000-of-00001.parquet"
    write_shard(path, [encode(picture(0, (64, 64)))], [0], column="image")
    assert load_data("tiny-imagenet").classes == card.classes
    table = pq.read_table(path)
    for names, expected in (
        (order, (*card.classes[5:], "n08742578", *card.classes[:4])),
        (order[:10], card.classes),
        ([7] * 200, card.classes),
        (["<script>"] * 200, card.classes),
    ):
        said = json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
        pq.write_table(table.replace_schema_metadata({b"huggingface": said}), path)
        assert load_data("tiny-imagenet").classes == expected
    for damaged in (b"[not json", b"[" * 100000, b"\xff"):
        pq.write_table(table.replace_schema_metadata({b"huggingface": damaged}), path)
        assert load_data("tiny-imagenet").classes == card.classes


def test_classes_are_selected_by_the_names_in_the_file(mirror):
    card = DATASETS["tiny-imagenet"]
    path = mirror / card.hub / "data" / "valid-00000-of-00001.parquet"
    write_shard(path, [encode(picture(i, (64, 64))) for i in range(200)], list(range(200)), column="image")
    said = json.dumps({"info": {"features": {"label": {"names": card.wnids[::-1]}}}}).encode()
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"huggingface": said}), path)
    found = load_data("tiny-imagenet:only=goldfish+bullfrog")
    assert found.classes == ("bullfrog", "goldfish")
    assert found.labels.tolist() == [0, 1]
    assert np.array_equal(found.images[1], np.asarray(picture(199, (64, 64))).transpose(2, 0, 1))


# What is wrong with them


def test_a_missing_file_is_named(tmp_path):
    cifar10_binary(tmp_path)
    cifar10_python(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    said = complaint(f"folder:{tmp_path / 'cifar-10-batches-bin'}", split="train")
    assert said.endswith("data_batch_3.bin is missing")
    assert complaint(f"folder:{tmp_path / 'cifar-10-batches-py'}").endswith("test_batch is missing")
    write_idx(tmp_path / "idx" / "train-images-idx3-ubyte", GRAY[:, 0])
    assert complaint(f"folder:{tmp_path / 'idx'}").endswith("t10k-images-idx3-ubyte is missing")
    assert complaint(f"folder:{tmp_path / 'idx'}", split="train").endswith("train-labels-idx1-ubyte is missing")


def test_damaged_records(tmp_path):
    cifar10_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    test = folder / "test_batch.bin"
    whole = test.read_bytes()
    test.write_bytes(whole[:-1])
    assert "30729 bytes; expected a positive multiple of the record length 3073" in complaint(f"folder:{folder}")
    test.write_bytes(b"")
    assert "0 bytes; expected a positive multiple" in complaint(f"folder:{folder}")
    test.write_bytes(b"\x0a" + whole[1:])
    assert "label 10 at index 0; expected 0..9 (10 classes)" in complaint(f"folder:{folder}")
    write_stl10(tmp_path / "stl", "test", random_images(2, (3, 96, 96)), [0, 1])
    (tmp_path / "stl" / "test_y.bin").write_bytes(b"\x01\x00")
    assert "label -1 at index 1; expected 0..9" in complaint(f"folder:{tmp_path / 'stl'}")
    (tmp_path / "stl" / "test_y.bin").write_bytes(b"\x01\x02\x03")
    assert "has 2 images, but" in complaint(f"folder:{tmp_path / 'stl'}")


def test_damaged_idx(tmp_path):
    images, labels = tmp_path / "t10k-images-idx3-ubyte.gz", tmp_path / "t10k-labels-idx1-ubyte"
    write_idx(labels, np.zeros(7, np.uint8))

    def said(data: bytes) -> str:
        images.write_bytes(gzip.compress(data))
        return complaint(f"folder:{tmp_path}")

    write_idx(images, GRAY[:, 0])
    right = gzip.decompress(images.read_bytes())
    assert "not an idx file of unsigned bytes with 3 dimensions" in said(b"\x00\x00\x0d" + right[3:])
    assert "the file is truncated" in said(right[:-1])
    assert "the file is longer than its header states" in said(right + b"\x00")
    assert "the file is truncated" in said(right[:9])
    assert "images have 29x28 pixels; expected 28x28" in said(right[:11] + b"\x1d" + right[12:])
    assert "4294967295 images, but" in said(right[:4] + b"\xff" * 4 + right[8:])
    images.write_bytes(b"not gzip")
    assert "cannot be read: BadGzipFile" in complaint(f"folder:{tmp_path}")
    write_idx(images, GRAY[:, 0])
    images.write_bytes(images.read_bytes()[:-30])
    assert "cannot be read: EOFError" in complaint(f"folder:{tmp_path}")


def test_idx_header_with_terabytes_allocates_nothing(tmp_path):
    """Both headers state four billion images; no memory is allocated for them."""
    for name, lengths in (
        ("t10k-images-idx3-ubyte", b"\xff\xff\xff\xff\0\0\0\x1c\0\0\0\x1c"),
        ("t10k-labels-idx1-ubyte", b"\xff" * 4),
    ):
        (tmp_path / name).write_bytes(bytes([0, 0, 8, len(lengths) // 4]) + lengths + b"\0" * 784)
    said = complaint(f"folder:{tmp_path}")
    assert "GiB and cannot be cached on disk" in said or "the file is truncated" in said


def test_damaged_matlab_files(tmp_path):
    file = tmp_path / "test_32x32.mat"
    file.write_bytes(b"MATLAB 5.0 MAT-file" + b"\0" * 200)
    assert "not a readable MATLAB file" in complaint(f"folder:{tmp_path}")
    for held in (
        {"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))},
        {"X": np.zeros((31, 32, 3, 2), np.uint8), "y": np.ones((2, 1))},
        {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))},
        {"X": np.zeros((32, 32, 3, 2), np.uint8)},
        {"Z": np.zeros(3)},
    ):
        scipy.io.savemat(file, held)
        assert "expected X (32, 32, 3, N) of uint8 and y (N, 1)" in complaint(f"folder:{tmp_path}")
    scipy.io.savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0.5], [1]])})
    assert "labels are float64; expected integers" in complaint(f"folder:{tmp_path}")
    scipy.io.savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])})
    assert "label 11 at index 1" in complaint(f"folder:{tmp_path}")


class Payload:
    """An ordinary unpickler would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


class Evaluates:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self):
        return (eval, (self.code,))


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_with_payload_is_not_executed(tmp_path, protocol):
    folder = tmp_path / "cifar-10-batches-py"
    cifar10_python(tmp_path)
    written = tmp_path / "written"
    for payload in (Payload(written), Evaluates(f"open({str(written)!r}, 'w')"), np.float64, print, InputError("x")):
        for held in (payload, {b"data": payload, b"labels": [0]}, {payload: 1} if payload.__hash__ else payload):
            (folder / "test_batch").write_bytes(pickle.dumps(held, protocol=protocol))
            said = complaint(f"folder:{folder}")
            assert f"{folder / 'test_batch'}: refused: it would run" in said
            assert "data files must not contain code" in said
    assert not written.exists()


ARRAY = pickle.dumps({b"data": CIFAR[:1].reshape(1, 3072), b"labels": [3]}, protocol=2)


@pytest.mark.parametrize(
    "data",
    {
        "empty": b"",
        "not a pickle": b"PK\x03\x04",
        "cut": ARRAY[:2000],
        "other shape": ARRAY.replace(b"M\x00\x0c", b"M\x01\x0c"),
        "huge shape": ARRAY.replace(b"M\x00\x0c", b"J\xff\xff\xff\x7f"),
        "objects": ARRAY.replace(b"u1", b"O8"),
        "a place in the memo beyond all memory": b"\x80\x02]r\xff\xff\xff\x7f.",
        "bytes beyond all memory": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f" + b".",
        "a list": pickle.dumps([1, 2]),
        "no array": pickle.dumps({b"data": b"x" * 3072, b"labels": [3]}),
        "labels are text": pickle.dumps({b"data": CIFAR[:1].reshape(1, 3072), b"labels": ["cat"]}),
        "labels out of range": pickle.dumps({b"data": CIFAR[:1].reshape(1, 3072), b"labels": [2**70]}),
        "more labels": pickle.dumps({b"data": CIFAR[:1].reshape(1, 3072), b"labels": [1, 2]}),
        "state for a class": b"\x80\x02cnumpy\nndarray\n}(X\x01\x00\x00\x00aK\x01ub.",
        "settings for a class": b"\x80\x02cnumpy\ndtype\n}N}X\x08\x00\x00\x00__init__K\x01s\x86b.",
        "an instance": b"(inumpy\nndarray\n.",
        "persistent": b"Pabc\n.",
        "extension": b"\x80\x02\x82\x01.",
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_pickles_raise_one_line_errors(tmp_path, data):
    cifar10_python(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    (folder / "test_batch").write_bytes(data[1])
    assert str(folder / "test_batch") in complaint(f"folder:{folder}")
    assert load_data(f"folder:{folder}", split="train").labels.tolist() == LABELS[:40]  # the reader is unharmed


def test_image_with_a_huge_header_is_refused(tmp_path):
    imagenet(tmp_path, {"val/n01440764": [(30, 40), (50, 60)]})
    (tmp_path / "val" / "n01440764" / "2.JPEG").write_bytes(claimed(50000, 50000))
    assert "more than 67108864 pixels" in complaint(f"folder:{tmp_path}")


def test_class_without_images_keeps_its_label(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "f" / name).mkdir(parents=True)
    save_image(tmp_path / "f" / "c" / "1.png", random_images(1, (3, 4, 4))[0])
    found = load_data(f"folder:{tmp_path / 'f'}")
    assert (found.classes, found.labels.tolist()) == (("a", "b", "c"), [2])


# Where they are found


def test_prepared_folder_is_recorded(tmp_path, cache, monkeypatch, offline):
    cifar10_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    found, missing = prepare("cifar10", folder)
    assert (list(found), missing) == (["train", "test"], [])
    assert np.array_equal(load_data("cifar10", split="train").images, CIFAR[:40])
    assert offline == []
    folder.rename(tmp_path / "moved")
    assert "was prepared from" in complaint("cifar10")
    prepare("cifar10", tmp_path / "moved")
    other = tmp_path / "other"
    write_cifar_binary(other / "cifar-10-batches-bin" / "test_batch.bin", CIFAR[:2], [1, 2])
    monkeypatch.setenv("CLASSWISE_DATA", str(other))
    assert load_data("cifar10").labels.tolist() == [1, 2]  # the environment variable takes precedence


def test_prepare_errors(tmp_path, cache):
    def said(name: str, folder: Path | None = None) -> str:
        with pytest.raises(InputError) as caught:
            prepare(name, folder)
        return str(caught.value)

    assert "contains no cifar10 (train) in a known layout" in said("cifar10", tmp_path)
    assert said("cifar10", tmp_path / "none") == f"{tmp_path / 'none'}: no such directory"
    assert "folder:x=1 needs no preparation" in said("folder:x=1", tmp_path)
    assert "comes with scikit-learn" in said("digits", tmp_path)
    assert not (cache / "from").exists()
    imagenet(tmp_path, {"val/n01440764": [(300, 300)]})
    found, missing = prepare("imagenet:resize=32,crop=28", tmp_path)
    assert list(found) == ["test"]
    assert "no folder for the split train" in missing[0]
    assert load_data("imagenet:resize=32,crop=28").images.shape == (1, 3, 28, 28)


def test_named_pipes_are_ignored(tmp_path):
    (tmp_path / "f" / "a").mkdir(parents=True)
    os.mkfifo(tmp_path / "f" / "a" / "1.png")
    assert "no image files" in complaint(f"folder:{tmp_path / 'f'}")
    for name in ("t10k-images-idx3-ubyte", "test_batch.bin", "test_32x32.mat", "wnids.txt"):
        os.mkfifo(tmp_path / "f" / name)
    assert "no image files" in complaint(f"folder:{tmp_path / 'f'}")
    loop = tmp_path / "f" / "a" / "loop"
    loop.symlink_to(tmp_path / "f")
    assert "no image files" in complaint(f"folder:{tmp_path / 'f'}")


def test_parquet_file_of_another_data_set_is_ignored(tmp_path, offline):
    """A folder of several data sets without the requested one."""
    image = encode(picture(0, (28, 28), "L"))
    write_shard(tmp_path / "ylecun/mnist/mnist/test-00000-of-00001.parquet", [image], [1], column="image")
    with pytest.raises(InputError, match="contains no fashion-mnist"):
        prepare("fashion-mnist", tmp_path)
    found, _ = prepare("mnist", tmp_path / "ylecun" / "mnist")
    assert found["test"].labels.tolist() == [1]


def test_data_sets_written_by_analyses_are_class_folders(tmp_path):
    """Colored, recomposed and robust images are kept as PNG files by label, which no layout claims."""
    x = torch.arange(4 * 3 * 8 * 8).reshape(4, 3, 8, 8).remainder(256) / 255
    labels = np.array([2, 0, 2, 1])
    how = {"kind": "test"}
    spec = write_image_folder(tmp_path / "made", how, {"train": [(x, labels)], "test": [(x[:2], labels[:2])]}, total=6)
    train, test = load_data(spec, split="train"), load_data(spec)
    assert train.labels.tolist() == [0, 1, 2, 2]
    assert np.array_equal(train.images, (x * 255).round().to(torch.uint8).numpy()[[1, 3, 0, 2]])
    assert test.labels.tolist() == [0, 2]
    assert test.classes == ("0000", "0001", "0002")


def test_every_layout_belongs_to_a_card():
    assert set(LAYOUTS) == {name for name, card in DATASETS.items() if card.hub is not None}
