"""From encoded images to pixels, with Pillow, bounded and with one-line errors."""

# n images, C channels, H height, W width

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from classwise.errors import InputError, one_line

Mode = Literal["L", "RGB"]

MAX_PIXELS = 2**24
"""Larger images are refused before they are decoded: a file of a few bytes can claim any size."""

GREY = frozenset({"1", "L", "LA", "La"})
PALETTES = frozenset({"P", "PA"})


def prepare() -> None:
    """Load all of Pillow's formats; to be called before threads decode, where loading them would be a race."""
    Image.init()


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
    return "L" if image.mode in GREY else "RGB"


def pixels(image: Image.Image, mode: Mode) -> NDArray[np.uint8]:
    """(H, W, C) of an image in a mode."""
    if image.mode.startswith(("I", "F")):
        # Pillow would clip such pixels to 255 without a word.
        raise InputError(f"pixels of mode {image.mode!r}; expected 8 bits a channel")
    if image.mode in PALETTES and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode != mode:
        image = image.convert(mode)
    width, height = image.size
    return np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(height, width, -1)


def decode(
    encoded: Sequence[bytes | Path], mode: Mode, size: tuple[int, int], where: Callable[[int], str]
) -> NDArray[np.uint8]:
    """(n, C, H, W) of images that must all have one height and width; ``where`` names the i-th in errors."""
    found = np.empty((len(encoded), *size, len(mode)), dtype=np.uint8)
    hint = None
    for i, item in enumerate(encoded):
        try:
            with read_header(item, hint) as image:
                hint = image.format
                if image.size != size[::-1]:
                    raise InputError(f"{_size(image.size)} pixels; expected {_size(size[::-1])} as of every image")
                found[i] = pixels(image, mode)
        except Exception as error:
            raise undecodable(where(i), error) from error
    return found.transpose(0, 3, 1, 2)


def undecodable(where: str, error: Exception) -> InputError:
    """The error for an image that cannot be used. Pillow's plugins raise nearly anything on damaged files."""
    if isinstance(error, InputError):
        return InputError(f"{where}: {error}")
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return InputError(f"{where}: more than {MAX_PIXELS} pixels")
    if isinstance(error, UnidentifiedImageError):
        return InputError(f"{where}: not an image in a format that Pillow reads")
    return InputError(f"{where}: cannot be decoded: {one_line(error)}")


def _bounded(image: Image.Image) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        image.close()
        raise InputError(f"{_size(image.size)} pixels, more than {MAX_PIXELS}")
    return image


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
