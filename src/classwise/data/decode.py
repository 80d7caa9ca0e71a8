"""Decoding of image files with Pillow, with limits on their size and one-line errors."""

# n images, C channels, H height, W width

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from classwise.core.errors import InputError, one_line

Mode = Literal["L", "RGB"]

MAX_PIXELS = 2**26
"""Larger images are refused before they are decoded, because a small file can claim any size."""

PART_BYTES = 32 * 2**20
"""The approximate number of bytes of pixels that are decoded at a time."""
PART_ROWS = 1024
"""The maximum number of images that are decoded at a time, because their encoded files are kept in memory."""

GRAY = frozenset({"1", "L", "LA", "La"})
PALETTES = frozenset({"P", "PA"})


def decoders() -> ThreadPoolExecutor:
    """Return a pool of decoding threads; Pillow releases the GIL for most formats."""
    Image.init()  # loads all plugins now, because doing so in several threads is a race
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(16, available))


def rows_at_a_time(shape: Sequence[int]) -> int:
    """Return the number of images of shape (C, H, W) that are decoded at a time."""
    return max(1, min(PART_ROWS, PART_BYTES // max(1, math.prod(shape))))


def read_header(encoded: bytes | Path, hint: str | None = None) -> Image.Image:
    """Open an image without decoding it; ``hint`` is the format to try first."""
    file = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    if hint not in Image.OPEN:  # some formats are only detected through another: MPO through JPEG
        return _bounded(Image.open(file))
    try:
        # Without a hint, Pillow tries all of its forty formats in turn.
        return _bounded(Image.open(file, formats=(hint,)))
    except UnidentifiedImageError:
        return _bounded(Image.open(file))


def mode_of(image: Image.Image) -> Mode:
    """Return the mode, gray or color, that keeps the content of an image; transparency is dropped."""
    return "L" if image.mode in GRAY else "RGB"


def pixels(image: Image.Image, mode: Mode) -> NDArray[np.uint8]:
    """Return the pixels (H, W, C) of an image in a mode."""
    return _array(_in_mode(image, mode))


def cropped(image: Image.Image, mode: Mode, size: tuple[int, int], resize: int) -> NDArray[np.uint8]:
    """Return the center crop (H, W, C) of an image after resizing its shorter side to ``resize`` pixels.

    The pixels are identical to those of torchvision's Resize and CenterCrop on Pillow images.
    """
    width, height = (resize * length // min(image.size) for length in image.size)
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{_size(image.size)} pixels; the aspect ratio is too extreme to be resized to {resize} pixels"
        )
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    resized = _in_mode(image, mode).resize((width, height), Image.Resampling.BILINEAR)
    return _array(resized.crop((left, top, left + size[1], top + size[0])))


def decode(
    pool: ThreadPoolExecutor,
    encoded: Sequence[bytes | Path],
    mode: Mode,
    size: tuple[int, int],
    where: Callable[[int], str],
    resize: int | None = None,
) -> NDArray[np.uint8]:
    """Return the pixels (n, C, H, W) of images of one size, or of images resized and center-cropped to it.

    ``where`` returns the name of the i-th image for error messages.
    """
    found = np.empty((len(encoded), *size, len(mode)), dtype=np.uint8)
    step = max(1, min(64, len(encoded) // 32))

    def decode_slice(start: int) -> None:
        hint = None
        for i in range(start, min(start + step, len(encoded))):
            try:
                with read_header(encoded[i], hint) as image:
                    hint = image.format
                    if resize is None and image.size != size[::-1]:
                        raise InputError(
                            f"{_size(image.size)} pixels; expected {_size(size[::-1])}, the size of all images"
                        )
                    found[i] = pixels(image, mode) if resize is None else cropped(image, mode, size, resize)
            except Exception as error:
                raise undecodable(where(i), error) from error

    for _ in pool.map(decode_slice, range(0, len(encoded), step)):
        pass
    return found.transpose(0, 3, 1, 2)


def header(encoded: bytes | Path, where: str) -> tuple[tuple[int, int], Mode]:
    """Return height, width and mode of an image."""
    try:
        with read_header(encoded) as image:
            return (image.height, image.width), mode_of(image)
    except Exception as error:
        raise undecodable(where, error) from error


def common_format(
    owner: str, headers: Iterable[tuple[str, tuple[tuple[int, int], Mode]]]
) -> tuple[tuple[int, int], Mode]:
    """Return the size of named images, which must be the same, and the mode: color unless all are gray."""
    (first, (size, mode)), *others = headers
    for where, (other, other_mode) in others:
        if other != size:
            raise InputError(
                f"{owner}: images have different sizes: {first} is {_size(size[::-1])}, "
                f"{where} is {_size(other[::-1])}: resize them to one size"
            )
        mode = mode if mode == other_mode else "RGB"
    return size, mode


def undecodable(where: str, error: Exception) -> InputError:
    """Return the error for an image that cannot be decoded; Pillow's plugins raise many kinds of exceptions."""
    if isinstance(error, InputError):
        return InputError(f"{where}: {error}")
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return InputError(f"{where}: more than {MAX_PIXELS} pixels, the maximum")
    if isinstance(error, UnidentifiedImageError):
        return InputError(f"{where}: not an image, or in a format that Pillow does not read")
    return InputError(f"{where}: cannot be decoded: {one_line(error)}")


def _in_mode(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        # Pillow would silently clip such pixels to 255.
        raise InputError(f"pixels of mode {image.mode!r}; expected 8 bits per channel: convert the image")
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
        raise InputError(f"{_size(image.size)} pixels; expected at most {MAX_PIXELS} in total")
    return image


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
