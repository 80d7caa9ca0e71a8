"""The file layouts in which the authors of data sets publish them, and their detection in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from classwise.data.datasets import DATASETS, DatasetCard
from classwise.data.folders import states
from classwise.data.layouts.arrays import CifarBinary, CifarPython, Stl10Binary, SvhnMat
from classwise.data.layouts.base import Layout
from classwise.data.layouts.idx import Idx
from classwise.data.layouts.imagenet import ImageNetTree, TinyImageNetTree
from classwise.data.parquet import HubParquet, find_shards
from classwise.data.sources import FORMAT, Reading, Source
from classwise.storage.files import digest_json

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "mnist": (Idx(places=("MNIST/raw", "MNIST", "mnist")),),
    "fashion-mnist": (Idx(places=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist")),),
    "cifar10": (
        CifarBinary(
            places=("cifar-10-batches-bin", ""),
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test=("test_batch.bin",),
            label_bytes=1,
        ),
        CifarPython(
            places=("cifar-10-batches-py", ""),
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test=("test_batch",),
            meta="batches.meta",
            labels=b"labels",
        ),
    ),
    "cifar100": (
        CifarBinary(places=("cifar-100-binary", ""), train=("train.bin",), test=("test.bin",), label_bytes=2),
        CifarPython(
            places=("cifar-100-python", ""), train=("train",), test=("test",), meta="meta", labels=b"fine_labels"
        ),
    ),
    "svhn": (SvhnMat(places=("svhn", "SVHN", "")),),
    "stl10": (Stl10Binary(places=("stl10_binary", "stl10", "")),),
    "tiny-imagenet": (TinyImageNetTree(places=("tiny-imagenet-200", "tiny-imagenet", "")),),
    "imagenet": (
        ImageNetTree(places=("imagenet", "ImageNet", "imagenet-1k", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "")),
    ),
}
"""The layouts of each data set. A layout whose file names occur in two data sets does not have the place ``""``."""


@dataclass(frozen=True)
class OnDisk:
    """A data set in a folder with one of its published layouts."""

    name: str
    split: str
    card: DatasetCard
    layout: Layout
    folder: Path

    def origin(self) -> str:
        return str(self.folder)

    def fingerprint(self) -> str:
        card = self.card
        reading = [FORMAT, repr(self.layout), card.classes, card.wnids, card.mode, card.size, card.resize]
        return digest_json([reading, states(self.layout.files(self.folder, self.split), self.folder)])

    def open(self) -> Reading:
        return self.layout.open(self.folder, self.split, self.card)


def find(card: DatasetCard, dataset: str, split: str, root: Path, *, itself: bool = False) -> Source | None:
    """Find a data set below a directory of data sets; with ``itself`` the directory may also be the data set."""
    assert card.hub is not None
    # Only near the top, because deeper parquet files belong to other data sets.
    shallow = itself and any(next(root.glob(pattern), None) for pattern in ("*.parquet", "*/*.parquet"))
    for folder in (root / card.hub, *([root] if shallow else [])):
        if folder.is_dir() and find_shards(folder, card, split):
            return HubParquet(card, split, folder)
    for layout in LAYOUTS.get(dataset, ()):
        for place in (*layout.places, *([""] if itself else [])):
            for folder in (root / place, root / dataset / place):
                if folder.is_dir() and layout.files(folder, split):
                    return OnDisk(card.name, split, card, layout, folder)
    return None


def recognize(folder: Path, split: str) -> OnDisk | None:
    """Return the source of a folder that has the published layout of a known data set, else None."""
    if not folder.is_dir():
        return None
    for dataset, layouts in LAYOUTS.items():
        for layout in layouts:
            if layout.files(folder, split):
                card = layout.narrowed(DATASETS[dataset], folder)
                return OnDisk(f"folder:{folder}", split, card, layout, folder)
    return None
