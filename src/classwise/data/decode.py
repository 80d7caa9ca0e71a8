"""From encoded images to pixels, with Pillow, bounded and with one-line errors."""

# n images, C channels, H height, W width

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from classwise.core.errors import InputError, one_line

Mode = Literal["L", "RGB"]

MAX_PIXELS = 2**26
"""Larger images are refused before they are decoded: a file of a few bytes can claim any size."""

PART_BYTES = 32 * 2**20
"""About so many bytes of pixels are decoded at a time."""
PART_ROWS = 1024
"""At most so many images are decoded at a time: their files are held meanwhile."""

GRAY = frozenset({"1", "L", "LA", "La"})
PALETTES = frozenset({"P", "PA"})


def decoders() -> ThreadPoolExecutor:
    """Threads to decode with: Pillow decodes most formats outside the interpreter's lock."""
    Image.init()  # loads all formats now; in threads that would be a race
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(16, available))


def rows_at_a_time(shape: Sequence[int]) -> int:
    """How many images of a shape (C, H, W) make a part."""
    return max(1, min(PART_ROWS, PART_BYTES // math.prod(shape)))


def read_header(encoded: bytes | Path, hint: str | None = None) -> Image.Image:
    """Open an image without decoding it; ``hint`` is a format to try before all the others."""
    file = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    if hint not in Image.OPEN:  # some formats are only ever found by way of another: phones' MPO is a JPEG
        return _bounded(Image.open(file))
    try:
        # Without a hint, Pillow asks every one of its forty formats in turn.
        return _bounded(Image.open(file, formats=(hint,)))
    except UnidentifiedImageError:
        return _bounded(Image.open(file))


def mode_of(image: Image.Image) -> Mode:
    """The mode that keeps what an image shows; transparency is dropped."""
    return "L" if image.mode in GRAY else "RGB"


def pixels(image: Image.Image, mode: Mode) -> NDArray[np.uint8]:
    """(H, W, C) of an image in a mode."""
    return _array(_in_mode(image, mode))


def cropped(image: Image.Image, mode: Mode, size: tuple[int, int], resize: int) -> NDArray[np.uint8]:
    """(H, W, C) of the center of an image whose shorter side was first brought to ``resize`` pixels.

    Pixel for pixel what torchvision's Resize and CenterCrop make of a Pillow image.
    """
    width, height = (resize * length // min(image.size) for length in image.size)
    if width * height > MAX_PIXELS:
        raise InputError(f"{_size(image.size)} pixels, too narrow to be resized")
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    resized = _in_mode(image, mode).resize((width, height), Image.Resampling.BILINEAR)
    return _array(resized.crop((left, top, left + size[1], top + size[0])))


def decode(
    encoded: Sequence[bytes | Path],
    mode: Mode,
    size: tuple[int, int],
    where: Callable[[int], str],
    resize: int | None = None,
) -> NDArray[np.uint8]:
    """(n, C, H, W) of images of one height and width, or cut to it where ``resize`` says how.

    ``where`` names the i-th in errors.
    """
    found = np.empty((len(encoded), *size, len(mode)), dtype=np.uint8)
    hint = None
    for i, item in enumerate(encoded):
        try:
            with read_header(item, hint) as image:
                hint = image.format
                if resize is not None:
                    found[i] = cropped(image, mode, size, resize)
                elif image.size != size[::-1]:
                    raise InputError(f"{_size(image.size)} pixels; expected {_size(size[::-1])} as of every image")
                else:
                    found[i] = pixels(image, mode)
        except Exception as error:
            raise undecodable(where(i), error) from error
    return found.transpose(0, 3, 1, 2)


def decode_together(
    pool: ThreadPoolExecutor,
    encoded: Sequence[bytes | Path],
    mode: Mode,
    size: tuple[int, int],
    where: Callable[[int], str],
    resize: int | None = None,
) -> NDArray[np.uint8]:
    """As ``decode``, by several threads."""
    found = np.empty((len(encoded), len(mode), *size), dtype=np.uint8)
    step = max(1, min(64, len(encoded) // 32))

    def some(start: int) -> None:
        part = slice(start, start + step)
        found[part] = decode(encoded[part], mode, size, lambda i: where(start + i), resize)

    for _ in pool.map(some, range(0, len(encoded), step)):
        pass
    return found


def undecodable(where: str, error: Exception) -> InputError:
    """The error for an image that cannot be used. Pillow's plugins raise nearly anything on damaged files."""
    if isinstance(error, InputError):
        return InputError(f"{where}: {error}")
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return InputError(f"{where}: more than {MAX_PIXELS} pixels")
    if isinstance(error, UnidentifiedImageError):
        return InputError(f"{where}: not an image in a format that Pillow reads")
    return InputError(f"{where}: cannot be decoded: {one_line(error)}")


def _in_mode(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        # Pillow would clip such pixels to 255 without a word.
        raise InputError(f"pixels of mode {image.mode!r}; expected 8 bits a channel")
    if image.mode in PALETTES and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _array(image: Image.Image) -> NDArray[np.uint8]:
    width, height = image.size
    return np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(height, width, -1)


def _bounded(image: Image.Image) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        image.close()
        raise InputError(f"{_size(image.size)} pixels, more than {MAX_PIXELS}")
    return image


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
