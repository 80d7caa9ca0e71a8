"""Image files and parquet files in common layouts."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> Image.Image:
    """A random image of a height and width."""
    channels = () if mode == "L" else (len(mode),)
    values = np.random.default_rng(seed).integers(0, 256, (*size, *channels), dtype=np.uint8)
    return Image.fromarray(values)


def encode(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
    return file.getvalue()


def write_shard(
    path: Path,
    encoded: Sequence[bytes | None],
    labels: Sequence[Any],
    column: str = "img",
    label: str = "label",
) -> None:
    """A parquet file as the hub has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([None if b is None else {"bytes": b, "path": None} for b in encoded], type=kind)
    pq.write_table(pa.table({column: images, label: pa.array(labels)}), path, row_group_size=4)


def claimed(width: int, height: int) -> bytes:
    """A tiny PNG file that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
