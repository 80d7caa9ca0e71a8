"""Data sets in the parquet layout of the Hugging Face hub, from a mirror, the hub's cache or the hub."""

# N examples, C channels, H height, W width

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError, one_line, unknown
from classwise.data.datasets import DatasetCard, imagenet_classes
from classwise.data.decode import decode_together, decoders, rows_at_a_time
from classwise.data.directories import data_directory
from classwise.data.sources import FORMAT, Part, Reading
from classwise.storage.files import digest, digest_json


@dataclass(frozen=True)
class HubParquet:
    """A data set in the parquet layout of the Hugging Face hub.

    It is read from ``folder`` if given, else from ``org/name/.../<split>-*.parquet`` below CLASSWISE_DATA or from the
    hub's cache, and is downloaded otherwise.
    """

    card: DatasetCard
    split: str
    folder: Path | None = None

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
        assert self.card.hub is not None
        mirror = data_directory()
        folder = self.folder or (mirror and mirror / self.card.hub)
        found = find_shards(folder, self.card, self.split) if folder else []
        return found or self._from_hub(self.card.hub)

    def open(self) -> Reading:
        shards = self.shards()
        rows = [_row_count(shard) for shard in shards]
        return Reading(sum(rows), self.card.shape, self._classes(shards[0]), self._parts(shards, rows))

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
                    yield decode_together(pool, encoded, card.mode, card.size, where, card.resize), labels
                if end != count:
                    raise InputError(
                        f"{shard}: its metadata and its content differ from {count} rows: download it again"
                    )

    def _classes(self, shard: Path) -> tuple[str, ...]:
        """Return the card's class names, unless the file itself gives the WordNet id of each label.

        Copies of a data set may number the classes differently, for example by ids of another version of WordNet.
        """
        import pyarrow.parquet

        with _readable(shard):
            metadata = pyarrow.parquet.read_schema(shard).metadata or {}
        try:
            features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
            names = features[self.card.label_column]["names"]
            ids = len(names) == len(self.card.wnids) and all(re.fullmatch(r"n\d{8}", name) for name in names)
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.card.classes
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
        from huggingface_hub import snapshot_download

        names = [f"{split}-*.parquet" for split in self.card.splits[self.split]]
        folders = [f"{self.card.folder}/"] if self.card.folder else ["", "*/"]
        patterns = [folder + name for folder in folders for name in names]
        # The cache is tried first, so that no later run needs the network.
        for offline in (True, False):
            try:
                folder = snapshot_download(
                    repository, repo_type="dataset", allow_patterns=patterns, local_files_only=offline
                )
                if found := find_shards(Path(folder), self.card, self.split):
                    return found
            except Exception as error:  # the hub, the network and the disk raise many kinds of exceptions
                if offline:
                    continue
                raise InputError(
                    f"{self.name}: cannot download {repository} from the Hugging Face hub: {one_line(error, 120)}; "
                    f"offline, set CLASSWISE_DATA to a folder that contains {repository}, "
                    f"or run classwise data prepare {self.name} --from DIR"
                ) from error
        raise InputError(f"{self.name}: {repository} on the Hugging Face hub has no files {' or '.join(names)}")


def find_shards(root: Path, card: DatasetCard, split: str) -> list[Path]:
    """Return the files of a split below a folder in order, or an empty list; an incomplete set is an error."""
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
            raise InputError(
                f"{card.name}: {root} has {name}-*.parquet in several folders: {', '.join(folders)}; expected one"
            )
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


@contextmanager
def _readable(shard: Path) -> Iterator[None]:
    """Name the file in errors of the parquet reader."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{shard}: not a readable parquet file: {one_line(error)}") from error
