"""Images in class folders."""

# N examples, C channels, H height, W width

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from classwise.core.errors import InputError, one_line, unknown
from classwise.data.decode import Mode, common_format, decode, decoders, header, rows_at_a_time
from classwise.data.sources import FORMAT, Part, Reading
from classwise.storage.files import digest_json

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
"""Folder names of a split, in order of preference; any other split is a folder of its own name."""


@dataclass(frozen=True)
class Folder:
    """Images in class folders, ``PATH/<class>/*.png`` or ``PATH/<split>/<class>/*.png``.

    The classes are the sorted names of the class folders of all splits, so that labels agree between splits. Without
    split folders, every split is the whole folder. If gray and color images are mixed, all are converted to color.
    """

    path: Path
    split: str = "test"

    @property
    def name(self) -> str:
        return f"folder:{self.path}"

    def origin(self) -> str:
        return str(self.path)

    def fingerprint(self) -> str:
        root, classes, files, _ = self._scan()
        return digest_json([FORMAT, classes, states(files, root)])

    def open(self) -> Reading:
        _, classes, files, labels = self._scan()
        names = list(map(str, files))
        with decoders() as pool:
            size, mode = common_format(self.name, zip(names, pool.map(header, files, names), strict=True))
        return Reading(len(files), (len(mode), *size), tuple(classes), image_files(files, labels, mode, size))

    def _scan(self) -> tuple[Path, list[str], list[Path], list[int]]:
        """Return the folder of the split, the classes, and the image files with their labels, in order."""
        if not self.path.is_dir():
            raise InputError(f"{self.name}: no such folder")
        root, classes = self._split_folder()
        if not classes:
            hint = f": use parquet:{self.path}" if any(self.path.glob("*.parquet")) else ""
            raise InputError(f"{self.name}: no class folders; expected one folder of images for each class{hint}")
        files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = images_below(root / name)
            files += found
            labels += [label] * len(found)
        if not files:
            raise InputError(
                f"{self.name}: no image files in the class folders of {root}; expected {', '.join(sorted(EXTENSIONS))}"
            )
        return root, classes, files, labels

    def _split_folder(self) -> tuple[Path, list[str]]:
        known = {name for names in SPLIT_FOLDERS.values() for name in names}
        # A class may be named "train" too: a split contains folders, a class contains images.
        inside = {name: subfolders(self.path / name) for name in subfolders(self.path) if name in known}
        splits = {name: classes for name, classes in inside.items() if classes}
        if not splits:
            return self.path, subfolders(self.path)
        wanted = SPLIT_FOLDERS.get(self.split, (self.split,))
        chosen = next((name for name in wanted if name in splits), None)
        if chosen is None:
            raise unknown(f"split of {self.name}", self.split, splits)
        return self.path / chosen, sorted({name for classes in splits.values() for name in classes})


def image_files(
    files: Sequence[Path], labels: Sequence[int], mode: Mode, size: tuple[int, int], resize: int | None = None
) -> Iterator[Part]:
    """Yield the images of the files, part by part."""
    rows = rows_at_a_time((len(mode), *size))
    with decoders() as pool:
        for begin in range(0, len(files), rows):
            chunk = files[begin : begin + rows]
            images = decode(pool, chunk, mode, size, [str(file) for file in chunk].__getitem__, resize)
            yield images, np.array(labels[begin : begin + rows], dtype=np.int64)


def images_below(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted and without hidden ones."""
    found: list[Path] = []
    # A class may be missing from a split.
    pending = [str(folder)] if folder.is_dir() else []
    try:
        while pending:
            with os.scandir(pending.pop()) as entries:  # many times faster than rglob
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.name[entry.name.rfind(".") :].lower() in EXTENSIONS and entry.is_file():
                        found.append(Path(entry.path))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {one_line(error)}") from error
    return sorted(found)


def states(files: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of each file, for fingerprints."""
    try:
        found = [file.stat() for file in files]
    except OSError as error:
        raise InputError(f"{root}: cannot be read: {one_line(error)}") from error
    names = [file.relative_to(root).as_posix() for file in files]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in zip(names, found, strict=True)]


def subfolders(path: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted and without hidden ones."""
    return [entry.name for entry in entries(path) if entry.is_dir() and not entry.name.startswith(".")]


def entries(path: Path) -> list[Path]:
    """Return the entries of a folder, sorted."""
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
