"""A gallery of images on cards."""

# K classes, C channels, H height, W width

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

SMALL = 96
"""Images narrower than this many pixels are enlarged to this width, pixel by pixel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image with its caption."""

    png: str
    """PNG in base 64, as from ``png``."""
    alt: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Images that belong together, with a heading and lines of text."""

    heading: str
    pictures: Sequence[Picture]
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Gallery:
    """Cards side by side, as many in a row as fit."""

    cards: Sequence[Card]

    def html(self) -> Markup:
        """Return the cards for a page; their texts are escaped."""
        return Markup('<div class="gallery">{}</div>').format(Markup().join(map(_card, self.cards)))


def png(pixels: NDArray[Any], side: int | None = None) -> str:
    """Return an image (C, H, W) in [0, 1] as a PNG in base 64: RGB if C is 3, else the mean of the channels in gray.

    ``side``: a larger image is reduced to this width and height.
    """
    shades = np.asarray(pixels, dtype=np.float64)
    shades = np.moveaxis(shades, 0, -1) if len(shades) == 3 else shades.mean(0)
    image = Image.fromarray(np.round(255 * shades.clip(0, 1)).astype(np.uint8))
    if side is not None:
        image.thumbnail((side, side))
    written = io.BytesIO()
    image.save(written, "png")
    return base64.b64encode(written.getvalue()).decode()


def _card(card: Card) -> Markup:
    pictures = Markup().join(
        Markup('<figure><img{} src="data:image/png;base64,{}" alt="{}"><figcaption>{}</figcaption></figure>').format(
            Markup(' class="small"') if _width(one.png) <= SMALL else "", one.png, one.alt, one.caption
        )
        for one in card.pictures
    )
    lines = Markup().join(Markup("<p>{}</p>").format(line) for line in card.lines)
    return Markup("<div><h4>{}</h4><div>{}</div>{}</div>").format(card.heading, pictures, lines)


def _width(png: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        return image.width
