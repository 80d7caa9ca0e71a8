"""Data sets in the parquet layout of the Hugging Face hub, from a mirror, the hub's cache or the hub."""

# N examples, C channels, H height, W width

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError, one_line, unknown
from classwise.core.hub import from_hub, is_repository
from classwise.data.datasets import DatasetCard, imagenet_classes
from classwise.data.decode import common_format, decode, decoders, header, rows_at_a_time
from classwise.data.directories import data_directory
from classwise.data.sources import FORMAT, Part, Reading
from classwise.storage.files import digest, digest_json

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")
"""The columns of a data set without a card; the first one present is used."""
SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
"""The names of a split in the files of a data set without a card; any other split has its own name."""
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class HubParquet:
    """A data set in the parquet layout of the Hugging Face hub.

    It is read from ``folder`` (or file) if given, else from ``org/name/.../<split>-*.parquet`` below CLASSWISE_DATA or
    from the hub's cache, and is downloaded otherwise. What a card without classes leaves open is read from the files.
    """

    card: DatasetCard
    split: str
    folder: Path | None = None

    @classmethod
    def of_spec(cls, spec: str, split: str) -> HubParquet:
        """Return the source of ``parquet:PATH`` or ``hf:org/name[:config]``, which have no card."""
        kind, _, place = spec.partition(":")
        repository, _, folder = place.partition(":")
        splits = {split: SPLITS.get(split, (split,))}
        card = DatasetCard(name=spec, classes=(), mode="RGB", size=(0, 0), image_columns=IMAGE_COLUMNS, splits=splits)
        if kind == "parquet":
            return cls(card, split, Path(place).expanduser())
        if not is_repository(repository) or (folder and not re.fullmatch(r"[\w-][\w.-]*", folder, re.ASCII)):
            raise InputError(f"data {spec!r}: expected hf:org/name or hf:org/name:config")
        return cls(replace(card, hub=repository, folder=folder), split)

    @property
    def name(self) -> str:
        return self.card.name

    def origin(self) -> str:
        return str(self.shards()[0].parent)

    def fingerprint(self) -> str:
        card = self.card
        reading = [FORMAT, card.image_columns, card.label_column, card.classes, card.mode, card.size, card.resize]
        return digest(digest_json(reading), *(_identity(shard) for shard in self.shards()))

    def shards(self) -> list[Path]:
        """Return the parquet files of the split in order, downloading them if necessary."""
        if self.split not in self.card.splits:
            raise unknown(f"split of {self.name}", self.split, self.card.splits)
        hub, mirror = self.card.hub, data_directory()
        folder = self.folder or (mirror / hub if mirror and hub else None)
        if folder is not None and folder.is_file():
            return [folder]
        if hub is None and folder is not None and not folder.exists():
            raise InputError(f"{self.name}: no such file or directory")
        found = find_shards(folder, self.card, self.split) if folder else []
        if found or hub is not None:
            return found or self._from_hub(str(hub))
        # Without the name of any split, the files are those of every split.
        others = sorted(folder.glob("*.parquet")) if folder else []
        if not others or any(path.name.startswith(tuple(sum(SPLITS.values(), ()))) for path in others):
            raise InputError(f"{self.name}: no parquet files of the split {self.split}")
        return others

    def open(self) -> Reading:
        shards = self.shards()
        if not self.card.classes:
            return replace(self, card=self._described(shards))._open(shards)
        return self._open(shards)

    def _open(self, shards: list[Path]) -> Reading:
        rows = [_row_count(shard) for shard in shards]
        return Reading(sum(rows), self.card.shape, self._classes(shards[0]), self._parts(shards, rows))

    def _described(self, shards: list[Path]) -> DatasetCard:
        """Complete the card of a data set by the label column, the classes, and the size and mode of its images."""
        names = _schema(shards[0]).names
        column = next((name for name in LABEL_COLUMNS if name in names), self.card.label_column)
        source = replace(self, card=replace(self.card, label_column=column))
        classes = _label_names(shards[0], column)
        headers, most = [], 0
        for shard in shards:
            row = 0
            for encoded, labels in source._batches(shard):
                where = [f"{shard}: row {row + i}" for i in range(len(encoded))]
                headers += list(zip(where, map(header, encoded, where), strict=True))
                row, most = row + len(encoded), max(most, int(labels.max()))
        if not headers:
            raise InputError(f"{shards[0]}: contains no images")
        if most >= MOST_CLASSES:
            raise InputError(f"{self.name}: label {most}; expected integers below {MOST_CLASSES}")
        size, mode = common_format(self.name, headers)
        return replace(source.card, classes=classes or tuple(map(str, range(most + 1))), size=size, mode=mode)

    def _parts(self, shards: list[Path], rows: list[int]) -> Iterator[Part]:
        card = self.card
        with decoders() as pool:
            for shard, count in zip(shards, rows, strict=True):
                end = 0
                for encoded, labels in self._batches(shard):
                    begin, end = end, end + len(encoded)
                    if end > count:
                        break
                    where = [f"{shard}: row {row}" for row in range(begin, end)].__getitem__
                    yield decode(pool, encoded, card.mode, card.size, where, card.resize), labels
                if end != count:
                    raise InputError(
                        f"{shard}: its metadata and its content differ from {count} rows: download it again"
                    )

    def _classes(self, shard: Path) -> tuple[str, ...]:
        """Return the card's class names, unless the file itself gives the WordNet id of each label.

        Copies of a data set may number the classes differently, for example by ids of another version of WordNet.
        """
        names = _label_names(shard, self.card.label_column)
        ids = names and len(names) == len(self.card.wnids) and all(re.fullmatch(r"n\d{8}", name) for name in names)
        return tuple(imagenet_classes().get(name, name) for name in names) if ids else self.card.classes

    def _batches(self, shard: Path) -> Iterator[tuple[list[bytes], NDArray[np.int64]]]:
        """Yield the encoded images and the labels of a shard in chunks."""
        import pyarrow as pa
        import pyarrow.parquet

        card = self.card
        with _readable(shard), pa.parquet.ParquetFile(shard) as file:
            schema = file.schema_arrow
            image = next((column for column in card.image_columns if column in schema.names), None)
            if image is None or card.label_column not in schema.names:
                wanted = f"{' or '.join(card.image_columns)} and {card.label_column}"
                raise InputError(f"{shard} has the columns {', '.join(schema.names)}; expected {wanted}")
            kind = schema.field(image).type
            if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
                raise InputError(f"{shard}: column {image} is {kind}; expected a struct with the field bytes")
            if not pa.types.is_integer(schema.field(card.label_column).type):
                kind = schema.field(card.label_column).type
                raise InputError(f"{shard}: column {card.label_column} is {kind}; expected integers")
            row = 0
            for batch in file.iter_batches(rows_at_a_time(card.shape), columns=[image, card.label_column]):
                structs, labels = batch.column(image), batch.column(card.label_column)
                # flatten, unlike field, turns a missing struct into missing bytes
                encoded = structs.flatten()[structs.type.get_field_index("bytes")].to_pylist()
                for what, values in (("image bytes", encoded), ("label", labels.to_pylist())):
                    if None in values:
                        raise InputError(f"{shard}: row {row + values.index(None)} has no {what}")
                yield encoded, labels.to_numpy(zero_copy_only=False).astype(np.int64)
                row += len(encoded)

    def _from_hub(self, repository: str) -> list[Path]:
        names = [f"{split}-*.parquet" for split in self.card.splits[self.split]]
        folders = [f"{self.card.folder}/"] if self.card.folder else ["", "*/"]
        patterns = [folder + name for folder in folders for name in names]
        return from_hub(
            repository,
            patterns,
            lambda folder: find_shards(folder, self.card, self.split),
            kind="dataset",
            owner=f"{self.name}: ",
            hint=f"set CLASSWISE_DATA to a directory that contains {repository}"
            + (f", or run classwise data prepare {self.name} --from DIR" if self.card.classes else ""),
        )


def find_shards(root: Path, card: DatasetCard, split: str) -> list[Path]:
    """Return the files of a split below a folder in order, or an empty list; an incomplete set is an error."""
    for name in card.splits[split]:
        pattern = re.compile(re.escape(name) + r"(?:-(\d+)(?:-of-(\d+))?.*)?\.parquet")
        found = sorted(
            path
            for path in (root / card.folder).rglob(f"{name}*.parquet")
            if pattern.fullmatch(path.name) and not re.search(r"(^|/)\.", path.relative_to(root).as_posix())
        )
        if not found:
            continue
        folders = sorted({str(path.parent.relative_to(root)) for path in found})
        if len(folders) > 1:
            raise InputError(
                f"{card.name}: {root} has {name}-*.parquet in several folders: {', '.join(folders)}; expected one"
            )
        numbers = [match.groups() for path in found if (match := pattern.fullmatch(path.name))]
        totals = {total for _, total in numbers}
        if totals != {None}:
            present = [int(number or -1) for number, _ in numbers]
            expected = int(numbers[0][1] or 0)
            missing = next((number for number in range(expected) if number not in present), None)
            if missing is not None:
                part = f"{name}-{missing:05}-of-{expected:05}.parquet"
                raise InputError(f"{card.name}: {part} is missing in {found[0].parent}")
            if len(totals) > 1 or len(present) != expected:
                raise InputError(
                    f"{card.name}: {found[0].parent} has {name}-*.parquet of more than one version: remove the old ones"
                )
        return found
    return []


def _identity(path: Path) -> str:
    """Return a fingerprint of name, size, time and end of a file; the end of a parquet file has column statistics."""
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


def _schema(shard: Path) -> Any:
    import pyarrow.parquet

    with _readable(shard):
        return pyarrow.parquet.read_schema(shard)


def _label_names(shard: Path, column: str) -> tuple[str, ...]:
    """Return the names of the labels in a column, empty if the file does not contain them."""
    try:
        features = json.loads((_schema(shard).metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        names = features[column]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


@contextmanager
def _readable(shard: Path) -> Iterator[None]:
    """Name the file in errors of the parquet reader."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{shard}: not a readable parquet file: {one_line(error)}") from error
