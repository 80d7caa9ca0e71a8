"""Settings of named data sets, and the data sets derived by them: subsets, long tails, backgrounds, corruptions."""

# N examples, K classes, B batch, C channels, H height, W width

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageColor
from torch import Tensor

from classwise.config.spec import Names, Number, Spec, convert
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.corruptions import Corruption
from classwise.data.arrays import ImageSet, release
from classwise.data.batches import to_float
from classwise.data.cache import materialize
from classwise.data.datasets import DATASETS, DatasetCard
from classwise.data.decode import rows_at_a_time
from classwise.data.sources import FORMAT, Reading, Source
from classwise.data.splits import draw
from classwise.storage.files import digest_json

MAX_SIDE = 4096
"""The largest ``resize`` that is accepted."""


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The settings of a named data set, as in ``cifar10:without=cat``."""

    only: Names = ()
    """Classes to keep, by name or number; labels are renumbered. [default: all]"""
    without: Names = ()
    """Classes to remove; labels are renumbered."""
    imbalance: Number = 1.0
    """The ratio of training images of the first class to the last, decreasing exponentially between them."""
    seed: int = 0
    """The random seed of ``imbalance`` and of the noise of ``corruption``."""
    background: Names = ()
    """Background colors for gray images, assigned to the classes in turn: ``blue+yellow`` or ``#0033b3``. [default:
    none]"""
    corruption: str | None = None
    """A corruption of all images, such as ``fog``."""
    severity: int = 3
    """The severity of the corruption, from 1 to 5."""
    resize: int | None = None
    """The length of the shorter side before the center crop, for images of different sizes."""
    crop: int | None = None
    """Height and width of the center crop."""

    def __post_init__(self) -> None:
        if self.imbalance < 1:
            raise InputError(f"imbalance = {self.imbalance:g}; expected 1 or more")
        if self.seed < 0:
            raise InputError(f"seed = {self.seed}; expected 0 or more")
        if self.corruption is not None:
            Corruption(kind=self.corruption, severity=self.severity)  # raises if it does not exist
        _ = self.colors

    @classmethod
    def parse(cls, spec: str) -> tuple[Spec, DatasetSettings]:
        """Parse a data spec into its name and settings."""
        read = Spec.parse(spec)
        return read, cls(**convert(f"data {read.name!r}", cls, read.options))

    @property
    def derives(self) -> bool:
        """Whether the settings select or change images."""
        return bool(self.only or self.without or self.imbalance > 1 or self.background or self.corruption)

    @property
    def colors(self) -> list[tuple[int, ...]]:
        """The background colors as RGB values up to 255."""
        try:
            return [ImageColor.getrgb(color)[:3] for color in self.background]
        except ValueError as error:
            raise InputError(f"background: {error}; expected a color such as red or #ff0000") from None

    def sized(self, card: DatasetCard) -> DatasetCard:
        """Return the card with the chosen image size, and a name that contains it."""
        if self.background and card.mode != "L":
            raise InputError(f"{card.name} has color images; background needs gray images")
        if self.resize is None and self.crop is None:
            return card
        if card.resize is None:
            raise InputError(f"{card.name} has images of one size; resize and crop are for images of different sizes")
        resize = card.resize if self.resize is None else self.resize
        crop = card.size[0] if self.crop is None else self.crop
        if not 1 <= crop <= resize <= MAX_SIDE:
            raise InputError(f"resize = {resize}, crop = {crop}; expected 1 <= crop <= resize <= {MAX_SIDE}")
        return replace(card, name=f"{card.name}:resize={resize},crop={crop}", size=(crop, crop), resize=resize)

    def labels(self, card: DatasetCard) -> list[int]:
        """Return the labels of the classes that are kept, in order."""
        removed = {_label(card, name) for name in self.without}
        only = {_label(card, name) for name in self.only} or set(range(len(card.classes)))
        if not (kept := sorted(only - removed)):
            raise InputError(f"{card.name}: no class is left; check only and without")
        return kept


def _label(card: DatasetCard, name: str) -> int:
    """Return the label of a class given by its name or number."""
    if name in card.classes:
        return card.classes.index(name)
    if name.isdecimal() and name.isascii() and int(name) < len(card.classes):
        return int(name)
    near = difflib.get_close_matches(name, card.classes, n=3, cutoff=0.5)
    hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ";"
    last = len(card.classes) - 1
    raise InputError(f"{card.name} has no class {name!r}{hint} expected a class name or a label from 0 to {last}")


@dataclass(frozen=True)
class Derived:
    """A data set with settings applied. ``imbalance`` applies to the training split only."""

    name: str
    source: Source
    card: DatasetCard
    settings: DatasetSettings

    @property
    def split(self) -> str:
        return self.source.split

    def origin(self) -> str:
        return self.source.origin()

    def fingerprint(self) -> str:
        return digest_json([FORMAT, self.source.fingerprint(), self.split, astuple(self.settings)])

    def open(self) -> Reading:
        full = materialize(self.source)
        classes = full.classes or self.card.classes
        kept = self.settings.labels(replace(self.card, classes=classes))  # the files may number the classes differently
        rows = np.flatnonzero(np.isin(full.labels, kept))
        labels = np.searchsorted(kept, full.labels[rows])
        if self.split == "train" and self.settings.imbalance > 1:
            thinned = long_tail(labels, len(kept), self.settings.imbalance, self.settings.seed)
            rows, labels = rows[thinned], labels[thinned]
        if not len(rows):
            raise InputError(f"{self.name} ({self.split}): no examples are left")
        channels, height, width = self.card.shape
        shape = (3 if self.settings.background else channels, height, width)
        parts = ((self.transformed(*part), part[1]) for part in _parts(full, rows, labels))
        return Reading(len(rows), shape, tuple(classes[label] for label in kept), parts)

    def transformed(
        self, images: NDArray[np.uint8], labels: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Return images (B, C, H, W) with background and corruption applied; ``rows`` are their indices in the full
        data set."""
        settings = self.settings
        if not (settings.background or settings.corruption):
            return images
        x = to_float(images)
        if settings.background:
            colors = torch.tensor(settings.colors)[torch.from_numpy(labels) % len(settings.background)] / 255
            x = on_colors(x, colors)
        if settings.corruption:
            noise = ExampleNoise(settings.seed, torch.from_numpy(rows))
            x = Corruption(kind=settings.corruption, severity=settings.severity)(x, generator=noise)
        pixels: NDArray[np.uint8] = (x * 255).round().to(torch.uint8).numpy()
        return pixels


def on_colors(x: Tensor, colors: Tensor) -> Tensor:
    """Put backgrounds of colors (B, 3) behind gray images (B, 1, H, W): x + (1 - x) · color, (B, 3, H, W)."""
    return x + (1 - x) * colors[:, :, None, None]


def long_tail(labels: NDArray[np.int64], num_classes: int, imbalance: float, seed: int) -> NDArray[np.int64]:
    """Return sorted indices of a long-tailed subset with n * imbalance ** (-k / (K - 1)) examples of class k.

    n is the size of the largest class (Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR
    2019). Every class keeps at least one example.

    >>> kept = long_tail(np.repeat([0, 1, 2], 100), 3, imbalance=100, seed=0)
    >>> np.bincount(np.repeat([0, 1, 2], 100)[kept]).tolist()
    [100, 10, 1]
    """
    largest = int(np.bincount(labels).max(initial=0))
    chosen = []
    for label in range(num_classes):
        # Rounded before truncation, because 100 * 0.01 ** 0.5 may be slightly less than 10.
        wanted = int(round(largest * imbalance ** (-label / max(1, num_classes - 1)), 6))
        chosen.append(draw(np.flatnonzero(labels == label), max(1, wanted), seed, label))
    return np.sort(np.concatenate(chosen))


def known_superclasses(dataset: str, num_classes: int) -> dict[str, list[int]]:
    """Return the superclasses of a data set by name or spec, empty if it has none or other classes than expected."""
    name, _, rest = dataset.partition(":")
    card = DATASETS.get(name)
    if card is None or (rest and "=" not in rest):
        return {}
    try:
        kept = DatasetSettings.parse(dataset)[1].labels(card)
    except InputError:  # not one of our data specs
        return {}
    if len(kept) != num_classes:
        return {}
    groups = {
        group: [kept.index(label) for label in labels if label in kept] for group, labels in card.superclasses.items()
    }
    return {group: labels for group, labels in groups.items() if labels}


def _parts(
    full: ImageSet, rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield images, labels and rows in chunks."""
    step = rows_at_a_time(full.images.shape[1:])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        yield full.images[rows[part]], labels[part], rows[part]
        release(full.images)
