"""Where images come from: scikit-learn, the Hugging Face hub or a mirror of it, folders, the user's code."""

# N examples, C channels, H height, W width

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from classwise.data.arrays import ImageSet
from classwise.data.cards import DATASETS, DatasetCard
from classwise.data.convert import as_image_set
from classwise.data.decode import Mode, decode, mode_of, prepare, read_header, undecodable
from classwise.errors import InputError, one_line, unknown
from classwise.files import digest, digest_json
from classwise.plugins import load_attribute
from classwise.progress import SILENT, Progress

FORMAT = 1
"""Part of every fingerprint: raised when the same files would be read into other arrays than before."""

ROWS = 1024
"""Encoded images held at a time while a data set is decoded."""

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
"""Folders that may hold a split, most wanted first; any other split is a folder of its own name."""


class Source(Protocol):
    """Something that images can be read from."""

    @property
    def name(self) -> str:
        """Of the data set, as in reports."""

    @property
    def split(self) -> str:
        """Which part of the data set."""

    def fingerprint(self) -> str:
        """Hexadecimal digits that change when the images do; cheap, where that is possible."""

    def read(self, progress: Progress = SILENT) -> ImageSet:
        """All images."""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels: 110 of each to train on, the other 697 to test.

    The data set has no split of its own; this one is drawn once within each digit, by a generator whose
    stream numpy guarantees never to change.
    """

    split: str = "test"

    @property
    def name(self) -> str:
        return "digits"

    def fingerprint(self) -> str:
        return digest_json([FORMAT, self.name, self.split])

    def read(self, progress: Progress = SILENT) -> ImageSet:
        if self.split not in DATASETS["digits"].splits:
            raise unknown("split of digits", self.split, DATASETS["digits"].splits)
        from sklearn.datasets import load_digits  # slow to import, and not needed once the images are cached

        found = load_digits()
        labels = found.target.astype(np.int64)
        images = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
        random = np.random.RandomState(0)
        train = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            train[random.permutation(np.flatnonzero(labels == label))[:110]] = True
        rows = np.flatnonzero(train if self.split == "train" else ~train)
        return ImageSet(
            name=self.name,
            split=self.split,
            images=images[rows],
            labels=labels[rows],
            classes=DATASETS["digits"].classes,
        )


@dataclass(frozen=True)
class HubParquet:
    """A data set in the parquet layout of the Hugging Face hub.

    It is looked for in the folder that CLASSWISE_DATA names, as ``org/name/.../<split>-*.parquet``, then in
    the hub's own cache, and is downloaded otherwise.
    """

    card: DatasetCard
    split: str

    @property
    def name(self) -> str:
        return self.card.name

    def fingerprint(self) -> str:
        card = self.card
        reading = [FORMAT, card.image_columns, card.label_column, card.classes, card.mode, card.size]
        return digest(digest_json(reading), *(_identity(shard) for shard in self.shards()))

    def shards(self) -> list[Path]:
        """The parquet files of the split, in order; downloads them if need be."""
        if self.split not in self.card.splits:
            raise unknown(f"split of {self.name}", self.split, self.card.splits)
        assert self.card.hub is not None
        if mirror := os.environ.get("CLASSWISE_DATA"):
            root = Path(mirror).expanduser()
            if not root.is_dir():
                raise InputError(f"CLASSWISE_DATA = {mirror!r} is not a folder")
            if found := find_shards(root / self.card.hub, self.card, self.split):
                return found
        return self._from_hub(self.card.hub)

    def read(self, progress: Progress = SILENT) -> ImageSet:
        shards = self.shards()
        rows = [_row_count(shard) for shard in shards]
        images = np.empty((sum(rows), len(self.card.mode), *self.card.size), dtype=np.uint8)
        labels = np.empty(sum(rows), dtype=np.int64)
        start = 0
        progress.start(f"decode {self.name}/{self.split}", len(labels))
        with _decoders() as pool:
            for shard, count in zip(shards, rows, strict=True):
                end = start
                for encoded, batch_labels in self._batches(shard):
                    begin, end = end, end + len(encoded)
                    if end > start + count:
                        break
                    labels[begin:end] = batch_labels
                    _decode_into(images[begin:end], encoded, self.card.mode, pool, f"{shard}: row", begin - start)
                    progress.advance(len(encoded))
                start += count
                if end != start:
                    raise InputError(f"{shard}: {count} rows announced, but not so many there")
        progress.finish()
        return ImageSet(name=self.name, split=self.split, images=images, labels=labels, classes=self.card.classes)

    def _batches(self, shard: Path) -> Iterator[tuple[list[bytes], NDArray[np.int64]]]:
        """The encoded images and the labels of a shard, some rows at a time."""
        import pyarrow as pa
        import pyarrow.parquet

        card = self.card
        with _readable(shard), pa.parquet.ParquetFile(shard) as file:
            schema = file.schema_arrow
            image = next((column for column in card.image_columns if column in schema.names), None)
            if image is None or card.label_column not in schema.names:
                wanted = f"{' or '.join(card.image_columns)} and {card.label_column}"
                raise InputError(f"{shard}: columns {', '.join(schema.names)}; expected {wanted}")
            kind = schema.field(image).type
            if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
                raise InputError(f"{shard}: column {image} is {kind}; expected a struct with the field bytes")
            if not pa.types.is_integer(schema.field(card.label_column).type):
                kind = schema.field(card.label_column).type
                raise InputError(f"{shard}: column {card.label_column} is {kind}; expected integers")
            row = 0
            for batch in file.iter_batches(ROWS, columns=[image, card.label_column]):
                structs, labels = batch.column(image), batch.column(card.label_column)
                # flatten, unlike field, lets a missing struct be missing bytes as well
                encoded = structs.flatten()[structs.type.get_field_index("bytes")].to_pylist()
                for what, values in (("image bytes", encoded), ("label", labels.to_pylist())):
                    if None in values:
                        raise InputError(f"{shard}: row {row + values.index(None)} has no {what}")
                yield encoded, labels.to_numpy(zero_copy_only=False).astype(np.int64)
                row += len(encoded)

    def _from_hub(self, repository: str) -> list[Path]:
        from huggingface_hub import snapshot_download

        names = [f"{split}-*.parquet" for split in self.card.splits[self.split]]
        folders = [f"{self.card.folder}/"] if self.card.folder else ["", "*/"]
        patterns = [folder + name for folder in folders for name in names]
        # First without the network: once downloaded, the same files serve every later run.
        for offline in (True, False):
            try:
                folder = snapshot_download(
                    repository, repo_type="dataset", allow_patterns=patterns, local_files_only=offline
                )
                if found := find_shards(Path(folder), self.card, self.split):
                    return found
            except Exception as error:  # the hub, the network and the disk each have errors of their own
                if offline:
                    continue
                raise InputError(
                    f"{self.name}: cannot download {repository} from the Hugging Face hub: {one_line(error, 120)}; "
                    f"offline, set CLASSWISE_DATA to a folder that holds {repository}"
                ) from error
        raise InputError(f"{self.name}: {repository} on the Hugging Face hub has no files {' or '.join(names)}")


def find_shards(root: Path, card: DatasetCard, split: str) -> list[Path]:
    """The files of a split below a folder, in order; none is an empty list, some but not all an error."""
    for name in card.splits[split]:
        pattern = re.compile(re.escape(name) + r"-(\d+)(?:-of-(\d+))?.*\.parquet")
        found = sorted(
            path
            for path in (root / card.folder).rglob(f"{name}-*.parquet")
            if pattern.fullmatch(path.name) and not re.search(r"(^|/)\.", path.relative_to(root).as_posix())
        )
        if not found:
            continue
        folders = sorted({str(path.parent.relative_to(root)) for path in found})
        if len(folders) > 1:
            raise InputError(f"{card.name}: {root} has {name}-*.parquet in several folders: {', '.join(folders)}")
        numbers = [match.groups() for path in found if (match := pattern.fullmatch(path.name))]
        totals = {total for _, total in numbers}
        if totals != {None}:
            present = [int(number) for number, _ in numbers]
            expected = int(numbers[0][1] or 0)
            missing = next((number for number in range(expected) if number not in present), None)
            if missing is not None:
                part = f"{name}-{missing:05}-of-{expected:05}.parquet"
                raise InputError(f"{card.name}: {part} is missing in {found[0].parent}")
            if len(totals) > 1 or len(present) != expected:
                raise InputError(f"{card.name}: {found[0].parent} has {name}-*.parquet of more than one version")
        return found
    return []


@dataclass(frozen=True)
class Folder:
    """Images in class sub-folders, ``PATH/<class>/*.png`` or ``PATH/<split>/<class>/*.png``.

    Classes are the sub-folders in sorted order: those of all splits together, so that a label means the same
    in each. Without folders for splits, every split is the whole folder. Where grey and colour are mixed, all
    become colour.
    """

    path: Path
    split: str = "test"

    @property
    def name(self) -> str:
        return f"folder:{self.path}"

    def fingerprint(self) -> str:
        root, classes, files, _ = self._scan()
        try:
            states = [file.stat() for file in files]
        except OSError as error:
            raise InputError(f"{self.name}: cannot be read: {one_line(error)}") from error
        names = [file.relative_to(root).as_posix() for file in files]
        entries = [[n, s.st_size, s.st_mtime_ns] for n, s in zip(names, states, strict=True)]
        return digest_json([FORMAT, classes, entries])

    def read(self, progress: Progress = SILENT) -> ImageSet:
        _, classes, files, labels = self._scan()
        with _decoders() as pool:
            headers = list(pool.map(_header, files))
            size = headers[0][0]
            for file, (other, _) in zip(files, headers, strict=True):
                if other != size:
                    raise InputError(
                        f"{self.name}: images of different sizes: {files[0]} is {size[1]}x{size[0]}, "
                        f"{file} {other[1]}x{other[0]}"
                    )
            mode: Mode = "L" if all(found == "L" for _, found in headers) else "RGB"
            images = np.empty((len(files), len(mode), *size), dtype=np.uint8)
            progress.start(f"decode {self.name}", len(files))
            for begin in range(0, len(files), ROWS):
                part = files[begin : begin + ROWS]
                _decode_into(images[begin : begin + len(part)], part, mode, pool)
                progress.advance(len(part))
            progress.finish()
        return ImageSet(
            name=self.name,
            split=self.split,
            images=images,
            labels=np.array(labels, dtype=np.int64),
            classes=tuple(classes),
        )

    def _scan(self) -> tuple[Path, list[str], list[Path], list[int]]:
        """The folder of the split, the classes, and the image files with their labels, in order."""
        if not self.path.is_dir():
            raise InputError(f"{self.name}: no such folder")
        root, classes = self._split_folder()
        if not classes:
            raise InputError(f"{self.name}: no sub-folders; expected one for each class")
        files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = sorted(
                path
                for path in (root / name).rglob("*")
                if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()
            )
            files += found
            labels += [label] * len(found)
        if not files:
            raise InputError(f"{self.name}: no image files in {root}; expected {', '.join(sorted(EXTENSIONS))}")
        return root, classes, files, labels

    def _split_folder(self) -> tuple[Path, list[str]]:
        known = {name for names in SPLIT_FOLDERS.values() for name in names}
        # A class may be called "train" too: a split holds folders, a class holds images.
        inside = {name: _subfolders(self.path / name) for name in _subfolders(self.path) if name in known}
        splits = {name: classes for name, classes in inside.items() if classes}
        if not splits:
            return self.path, _subfolders(self.path)
        wanted = SPLIT_FOLDERS.get(self.split, (self.split,))
        chosen = next((name for name in wanted if name in splits), None)
        if chosen is None:
            raise unknown(f"split of {self.name}", self.split, splits)
        return self.path / chosen, sorted({name for classes in splits.values() for name in classes})


@dataclass(frozen=True)
class Factory:
    """The user's own code, ``package.module:factory`` or ``path/to/file.py:factory``.

    What it returns, or is, may be a pair of images and labels, a Dataset, a DataLoader or an ImageSet. A
    parameter named ``split`` is told which split is wanted.
    """

    spec: str
    split: str = "test"

    @property
    def name(self) -> str:
        return self.spec

    def fingerprint(self) -> str:
        return self.read().digest()

    def read(self, progress: Progress = SILENT) -> ImageSet:
        found = load_attribute(self.spec, "data")
        try:
            if callable(found):
                found = found(split=self.split) if _takes_split(found) else found()
            return as_image_set(found, name=self.name, split=self.split)  # may run the user's code as well
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"data {self.spec!r}: reading it failed: {one_line(error)}") from error


def _takes_split(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    named = any(p.name == "split" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    return named or any(p.kind is p.VAR_KEYWORD for p in parameters)


def _decoders() -> ThreadPoolExecutor:
    """Threads to decode with: Pillow decodes most formats outside the interpreter's lock."""
    prepare()
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(16, available))


def _decode_into(
    out: NDArray[np.uint8],
    encoded: Sequence[bytes] | Sequence[Path],
    mode: Mode,
    pool: ThreadPoolExecutor,
    prefix: str = "",
    offset: int = 0,
    step: int = 64,
) -> None:
    """Decode images into an (n, C, H, W) array; errors name the path, or the prefix and the row's number."""

    def some(start: int) -> None:
        def where(i: int) -> str:
            item = encoded[start + i]
            return str(item) if isinstance(item, Path) else f"{prefix} {offset + start + i}"

        part = out[start : start + step]
        part[...] = decode(encoded[start : start + step], mode, (out.shape[2], out.shape[3]), where)

    for _ in pool.map(some, range(0, len(encoded), step)):
        pass


def _header(path: Path) -> tuple[tuple[int, int], Mode]:
    """Height and width, and the mode that keeps what the image shows."""
    try:
        with read_header(path) as image:
            return (image.height, image.width), mode_of(image)
    except Exception as error:
        raise undecodable(str(path), error) from error


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _identity(path: Path) -> str:
    """Name, size, time and end of a file; the end of a parquet file holds the statistics of its columns."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            file.seek(max(0, state.st_size - 2**16))
            return digest(path.name, str(state.st_size), str(state.st_mtime_ns), file.read())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error


def _row_count(shard: Path) -> int:
    import pyarrow.parquet

    with _readable(shard):
        return int(pyarrow.parquet.read_metadata(shard).num_rows)


@contextmanager
def _readable(shard: Path) -> Iterator[None]:
    """Say which file is at fault when parquet cannot be read."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{shard}: not a readable parquet file: {one_line(error)}") from error
