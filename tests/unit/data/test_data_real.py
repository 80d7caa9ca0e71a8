"""The real data sets, if a mirror is available: their statistics, and equal images in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from layout_files import save_image, write_cifar_python, write_idx

from classwise.data import DATASETS, load_data

EXPECTED = [
    ("cifar10", (10000, 3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1], [1000] * 10, 121.5),
    (
        "mnist",
        (10000, 1, 28, 28),
        [7, 2, 1, 0, 4, 1, 4, 9, 5, 9],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        33.8,
    ),
]


def mirrored(name: str, real_data: Path) -> Path:
    folder = real_data / str(DATASETS[name].hub)
    if not folder.is_dir():
        pytest.skip(f"no mirror of {DATASETS[name].hub}")
    return folder


@pytest.mark.parametrize(("name", "shape", "labels", "counts", "mean"), EXPECTED, ids=["cifar10", "mnist"])
def test_real_test_split(name, shape, labels, counts, mean, real_data):
    mirrored(name, real_data)
    found = load_data(name)
    assert found.images.shape == shape
    assert found.labels[:10].tolist() == labels
    assert found.counts(10).tolist() == counts
    assert abs(np.asarray(found.images).mean() - mean) < 0.1


def test_the_same_images_in_every_layout(real_data, tmp_path):
    """Images from parquet, rewritten in the published layouts, are read back unchanged with the same digest."""
    mirrored("mnist", real_data)
    mirrored("cifar10", real_data)
    mnist, cifar = load_data("mnist"), load_data("cifar10")
    for suffix in ("", ".gz"):
        folder = tmp_path / f"idx{suffix}"
        write_idx(folder / f"t10k-images-idx3-ubyte{suffix}", np.asarray(mnist.images[:2000, 0]))
        write_idx(folder / f"t10k-labels-idx1-ubyte{suffix}", mnist.labels[:2000].astype(np.uint8))
        assert load_data(f"folder:{folder}").digest() == mnist.take(range(2000)).digest()
    records = np.concatenate([cifar.labels.astype(np.uint8)[:, None], cifar.images.reshape(-1, 3072)], axis=1)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "test_batch.bin").write_bytes(records.tobytes())
    write_cifar_python(tmp_path / "py" / "test_batch", np.asarray(cifar.images), cifar.labels.tolist(), b"labels")
    (tmp_path / "py" / "batches.meta").write_bytes(b"")
    for folder in ("bin", "py"):
        assert load_data(f"folder:{tmp_path / folder}").digest() == cifar.digest()


def test_real_cifar100(real_data):
    folder = mirrored("cifar100", real_data)
    card = DATASETS["cifar100"]
    groups = list(card.superclasses)
    for split in ("train", "test"):
        found = load_data("cifar100", split=split)
        assert found.images.shape[1:] == (3, 32, 32)
        shards = sorted(folder.rglob(f"{split}-*.parquet"))
        coarse = [label for shard in shards for label in pq.read_table(shard)["coarse_label"].to_pylist()]
        assert len(coarse) == len(found)
        for fine, group in zip(found.labels.tolist(), coarse, strict=True):
            assert fine in card.superclasses[groups[group]]


def test_real_tiny_imagenet_as_a_tree(real_data, tmp_path):
    """Some of the images as class folders, in the published layout: the labels agree."""
    mirrored("tiny-imagenet", real_data)
    card = DATASETS["tiny-imagenet"]
    whole = load_data("tiny-imagenet")
    assert whole.images.shape[1:] == (3, 64, 64)
    assert set(whole.labels.tolist()) == set(range(200))
    rows = [int(np.flatnonzero(whole.labels == label)[0]) for label in range(0, 200, 10)]
    (tmp_path / "wnids.txt").write_text("\n".join(card.wnids[::-1]))
    lines = [f"val_{row}.JPEG\t{card.wnids[whole.labels[row]]}\t0\t0\t1\t1" for row in rows]
    for row in rows:
        save_image(tmp_path / "val" / "images" / f"val_{row}.JPEG", np.asarray(whole.images[row]))
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines))
    found = load_data(f"folder:{tmp_path}")
    assert found.digest() == whole.take(rows).digest()
    assert found.classes == whole.classes
