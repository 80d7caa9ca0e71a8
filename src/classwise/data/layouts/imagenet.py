"""The published layouts of ImageNet and Tiny-ImageNet: folders named by the WordNet ids of the classes."""

# N examples

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from classwise.core.errors import InputError, one_line
from classwise.data.datasets import DatasetCard, imagenet_classes
from classwise.data.decode import header
from classwise.data.folders import image_files, images_below, subfolders
from classwise.data.layouts.base import Layout
from classwise.data.sources import Reading

WNID = re.compile(r"n\d{8}")
SAMPLED = 8
"""The number of images of as many classes that are sampled to detect whether all have one size."""


@dataclass(frozen=True, kw_only=True)
class ImageNetTree(Layout):
    """``train/<id>/*.JPEG`` and ``val/<id>/*.JPEG`` with any subset of the classes, numbered in sorted order."""

    def files(self, folder: Path, split: str) -> list[Path]:
        splits = _split_folders(folder)
        if not any(_wnids(place) or _flat(place) for place in splits.values()):
            return []
        if split not in splits:
            present = " and ".join(place.name for place in splits.values())
            raise InputError(f"{folder}: no folder for the split {split}; found {present}")
        place = splits[split]
        if _flat(place):
            raise InputError(
                f"{place} contains images without class folders: move each to {place.name}/<WordNet id>/ "
                "according to the ground truth of the development kit"
            )
        return [file for wnid in _wnids(place) for file in images_below(place / wnid)]

    def narrowed(self, card: DatasetCard, folder: Path) -> DatasetCard:
        splits = _split_folders(folder)
        card = _of_classes(card, {wnid for place in splits.values() for wnid in _wnids(place)})
        # Images that were resized to one size keep it.
        sampled = [place / wnid for place in splits.values() for wnid in _wnids(place)[:SAMPLED]]
        sizes = {header(file, str(file))[0] for place in sampled for file in images_below(place)[:SAMPLED]}
        return replace(card, size=sizes.pop(), resize=None) if len(sizes) == 1 else card

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        place = _split_folders(folder)[split]
        files = self.files(folder, split)
        return _reading(files, [file.relative_to(place).parts[0] for file in files], card, folder)


@dataclass(frozen=True, kw_only=True)
class TinyImageNetTree(Layout):
    """``wnids.txt``, ``train/<id>/images/*.JPEG`` and ``val/images/*.JPEG`` with ``val/val_annotations.txt``.

    Classes are numbered in the sorted order of their ids, as by torchvision's ``ImageFolder``, not in the order of
    ``wnids.txt``.
    """

    def files(self, folder: Path, split: str) -> list[Path]:
        if not (folder / "wnids.txt").is_file():
            return []
        return [file for file, _ in self._labeled(folder, split)]

    def narrowed(self, card: DatasetCard, folder: Path) -> DatasetCard:
        return _of_classes(card, set(_lines(folder / "wnids.txt")))

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        labeled = self._labeled(folder, split)
        return _reading([file for file, _ in labeled], [wnid for _, wnid in labeled], card, folder)

    def _labeled(self, folder: Path, split: str) -> list[tuple[Path, str]]:
        """Return image files with class ids; the validation images may have been moved to class folders."""
        place = folder / ("train" if split == "train" else "val")
        wnids = _wnids(place)
        if wnids or split == "train":
            found = [(file, wnid) for wnid in wnids for file in images_below(place / wnid)]
        else:
            found = _annotated(place / "images", place / "val_annotations.txt")
        if not found:
            raise InputError(f"{folder}: no images of the split {split}; expected them in {place}")
        return found


def _annotated(place: Path, notes: Path) -> list[tuple[Path, str]]:
    """Return the images of a folder with their ids, from the first two columns of an annotation file."""
    rows = [line.split("\t") for line in _lines(notes)]
    for row in rows:
        if len(row) < 2 or Path(row[0]).name != row[0] or not (place / row[0]).is_file():
            raise InputError(f"{notes}: {row[0]!r} is not an image in {place}")
    return [(place / row[0], row[1]) for row in rows]


def _of_classes(card: DatasetCard, wnids: set[str]) -> DatasetCard:
    present = tuple(sorted(wnids))
    return replace(card, classes=tuple(imagenet_classes().get(wnid, wnid) for wnid in present), wnids=present)


def _reading(files: list[Path], wnids: list[str], card: DatasetCard, folder: Path) -> Reading:
    labels = {wnid: label for label, wnid in enumerate(card.wnids)}
    if unknown_wnid := next((wnid for wnid in wnids if wnid not in labels), None):
        raise InputError(f"{folder}: {unknown_wnid!r} is not a class of {card.name}")
    if not files:
        raise InputError(f"{folder}: no image files in the class folders")
    numbers = [labels[wnid] for wnid in wnids]
    return Reading(len(files), card.shape, card.classes, image_files(files, numbers, card.mode, card.size, card.resize))


def _split_folders(folder: Path) -> dict[str, Path]:
    names = {"train": ("train",), "test": ("val", "validation")}
    return {split: folder / name for split, some in names.items() for name in some if (folder / name).is_dir()}


def _flat(place: Path) -> bool:
    """Whether a folder contains the validation images without class folders, as in the published archive."""
    return next(place.glob("ILSVRC2012_val_*"), None) is not None


def _wnids(place: Path) -> list[str]:
    return [name for name in subfolders(place) if WNID.fullmatch(name)] if place.is_dir() else []


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise InputError(f"{file.parent}: {file.name} is missing")
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
