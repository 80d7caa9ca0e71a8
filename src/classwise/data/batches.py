"""Batches: training data that lives on the device, and an ordered walk through a set for evaluation."""

# N examples, B batch, K classes, C channels, H height, W width

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from classwise.core.errors import InputError
from classwise.data.arrays import ImageSet, release
from classwise.data.augment import augment, middle, random_parts, resample

Batch = tuple[Tensor, Tensor, Tensor]
"""Images (B, C, H, W) in [0, 1], labels (B,) and indices into the ImageSet (B,)."""


RESIDENT_BYTES = 8 * 2**30
"""Training data up to this size live on the device."""
READ_AHEAD = 2
"""Batches that are read from the disk before it is their turn."""


def to_float(images: np.ndarray | Tensor) -> Tensor:
    """Images as float32 in [0, 1], bit for bit the same on every device; float32 tensors as they are."""
    tensor = images if isinstance(images, Tensor) else _tensor(images)
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    if tensor.dtype != torch.uint8:
        raise InputError(f"images are {tensor.dtype}; expected uint8 or floating point")
    # A divisor on the device, because by a Python number CUDA multiplies with the rounded reciprocal instead.
    return tensor.to(torch.float32) / torch.full((), 255.0, device=tensor.device)


def ordered(
    images: ImageSet,
    indices: Sequence[int] | np.ndarray | None,
    batch_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> Iterator[Batch]:
    """The examples at some indices (None: all), in that order, untouched; the last batch may be smaller.

    With ``size`` the middle of each, so many pixels high and wide.
    """
    rows = _checked_rows(images, np.arange(len(images)) if indices is None else indices, batch_size)
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        x = _tensor(middle(images.images[some], size)).to(device, non_blocking=True)
        y = _tensor(images.labels[some]).to(device, non_blocking=True)
        release(images.images)
        yield to_float(x).to(dtype), y, _tensor(some).to(device, non_blocking=True)


def share_of(length: int, share: tuple[int, int]) -> slice:
    """The i-th of n pieces of something so long; no two differ by more than one."""
    i, n = share
    return slice(i * length // n, (i + 1) * length // n)


class Batches:
    """Training data, each iteration one epoch in a new order.

    They are held on the device once; a memory-mapped set of more than ``RESIDENT_BYTES`` stays on disk, and batches
    are read from there a little ahead of their turn.

    Everything random is drawn from ``generator`` where that lives, for a whole epoch when its first batch is
    asked for, and then moved to the device. With a generator on the CPU, order, crops and mirroring are
    therefore the same on every device, and its state at the start of an epoch is all a resumed run needs.
    """

    def __init__(
        self,
        images: ImageSet,
        indices: Sequence[int] | np.ndarray | None,
        *,
        batch_size: int,
        device: torch.device | str,
        generator: torch.Generator,
        crop: int = 0,
        flip: bool = False,
        part: float | None = None,
        size: int | None = None,
        sampling: Tensor | None = None,
        drop_last: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """``indices`` choose examples of the set (None: all); ``crop`` is the padding of random crops.

        With ``part`` images are random parts of at least that share of the area, brought to ``size`` pixels (None: the
        size they have). With ``share = (i, n)`` only the i-th of n pieces of every batch comes, as for one of n
        processes that all draw alike.
        """
        rows = _checked_rows(images, np.arange(len(images)) if indices is None else indices, batch_size)
        if not len(rows):
            raise InputError("there are no examples to make batches of")
        if crop < 0:
            raise InputError(f"a crop of {crop} pixels; expected 0 or more")
        if part is not None and crop:
            raise InputError("random parts and random crops exclude each other")
        if size is not None and part is None:
            raise InputError(f"images are brought to {size} pixels as random parts: say how small these may be")
        if drop_last and len(rows) < batch_size:
            raise InputError(f"{len(rows)} examples give no whole batch of {batch_size}")
        self.images = images
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.crop = crop
        self.flip = flip
        self.part = part
        self.size = tuple(images.images.shape[2:]) if size is None else (size, size)
        self.share = share
        self.generator = generator
        self.device = torch.device(device)
        labels = _tensor(images.labels[rows])
        self._counts = torch.bincount(labels)
        self._by_class = labels.argsort(stable=True)
        resident = images.images[:1].nbytes * len(rows) <= RESIDENT_BYTES or not isinstance(images.images, np.memmap)
        self._images = _tensor(images.images[rows]).to(self.device) if resident else _OnDisk(images.images, rows)
        self._labels = labels.to(self.device)
        self._indices = _tensor(rows).to(self.device)
        self.sampling = sampling

    @property
    def sampling(self) -> Tensor | None:
        """(K,) weights by which an epoch draws classes, then examples of the class evenly, with replacement.

        None shows every example once. A class without examples cannot be drawn, whatever its weight. May be
        set between epochs.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, weights: Tensor | None) -> None:
        if weights is not None:
            weights = weights.detach().to("cpu", torch.float64)
            if weights.dim() != 1 or len(weights) < len(self._counts):
                expected = f"({len(self._counts)},) or longer"
                raise InputError(f"sampling weights have shape {tuple(weights.shape)}; expected {expected}")
            if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
                raise InputError(f"sampling weights {weights.tolist()}; expected finite numbers, none negative")
            if not bool((weights[: len(self._counts)] * (self._counts > 0)).any()):
                raise InputError(f"sampling weights {weights.tolist()} leave no example to draw")
        self._sampling = weights

    @property
    def examples(self) -> int:
        """Examples an epoch draws from, and draws."""
        return len(self._by_class)

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        order = self._order().cpu()
        places = self._places().to(self.device, non_blocking=True)
        mirror = torch.zeros(self.examples, dtype=torch.bool)
        if self.flip:
            mirror = torch.rand(self.examples, generator=self.generator, device=self.generator.device) < 0.5
        mirror = mirror.to(self.device, non_blocking=True)
        parts, there = self._parts(), order.to(self.device, non_blocking=True)
        with closing(self._read(order, there, parts)) as images:  # whoever breaks off stops the reading too
            for where, x in zip(parts, images, strict=True):
                rows = there[where]
                yield self._changed(x, places[:, where], mirror[where]), self._labels[rows], self._indices[rows]

    def standing(self, number: int) -> tuple[int, int]:
        """How many examples of a whole batch come before this process's share, and how many it has in all."""
        whole = min(self.batch_size, self.examples - number * self.batch_size)
        return share_of(whole, self.share).start, whole

    def _parts(self) -> list[slice]:
        """Which of an epoch's examples make up each batch, or this process's share of it."""
        parts = []
        for number in range(len(self)):
            start, mine = number * self.batch_size, share_of(self.standing(number)[1], self.share)
            parts.append(slice(start + mine.start, start + mine.stop))
        return parts

    def _read(self, here: Tensor, there: Tensor, parts: Sequence[slice]) -> Generator[Tensor, None, None]:
        """The images of each part of an order, of which there is a copy here and one on the device."""
        if isinstance(self._images, Tensor):
            for where in parts:
                yield self._images[there[where]]
            return
        waiting: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(1, "read ahead") as reader:
            for number in range(len(parts) + READ_AHEAD):
                if number < len(parts):
                    waiting.append(reader.submit(self._images.read, here[parts[number]]))
                if number >= READ_AHEAD:
                    yield waiting.popleft().result().to(self.device, non_blocking=True)

    def _places(self) -> Tensor:
        """Draws for where each image of an epoch is cut."""
        place = self.generator.device
        if self.part is not None:
            return torch.rand((4, self.examples), generator=self.generator, device=place)
        if self.crop:
            return torch.randint(2 * self.crop + 1, (2, self.examples), generator=self.generator, device=place)
        return torch.zeros((2, self.examples), dtype=torch.int64)

    def _changed(self, x: Tensor, places: Tensor, mirror: Tensor) -> Tensor:
        """Images as they are trained on."""
        if self.part is not None:
            parts = random_parts(places, self.part, *x.shape[2:])
            return resample(to_float(x), parts, mirror, self.size)
        if self.crop or self.flip:
            x = augment(x, places[0], places[1], mirror, self.crop)
        return to_float(x)

    def _order(self) -> Tensor:
        """(N,) rows of the data held, in the order of this epoch."""
        place = self.generator.device
        if self._sampling is None:
            return torch.randperm(self.examples, generator=self.generator, device=place)
        weights = self._sampling[: len(self._counts)] * (self._counts > 0)
        classes = torch.multinomial(weights.to(place), self.examples, True, generator=self.generator).cpu()
        draws = torch.rand(self.examples, generator=self.generator, device=place, dtype=torch.float64).cpu()
        within = (draws * self._counts[classes]).long()
        first = self._counts.cumsum(0) - self._counts
        return self._by_class[first[classes] + within]


class MixedBatches:
    """Batches that are joined from two sources, the first of which decides how many make an epoch."""

    def __init__(self, first: Batches, second: Batches) -> None:
        self.first, self.second = first, second

    @property
    def sampling(self) -> Tensor | None:
        """Of the first source."""
        return self.first.sampling

    @sampling.setter
    def sampling(self, weights: Tensor | None) -> None:
        self.first.sampling = weights

    def __len__(self) -> int:
        return len(self.first)

    def standing(self, number: int) -> tuple[int, int]:
        """How many examples of a whole batch come before this process's share, and how many it has in all."""
        (before, whole), (more_before, more) = self.first.standing(number), self.second.standing(0)
        return before + more_before, whole + more

    def __iter__(self) -> Iterator[Batch]:
        """One epoch of the first. The second begins anew with every epoch, and again where it ends before.

        Indices of the second are counted on from those of the first.
        """
        beyond = len(self.first.images)
        for (x, y, index), (more_x, more_y, more) in zip(self.first, _endless(self.second), strict=False):
            yield torch.cat([x, more_x]), torch.cat([y, more_y]), torch.cat([index, more + beyond])


def _endless(batches: Batches) -> Iterator[Batch]:
    while True:
        yield from batches


class _OnDisk:
    """Images of a memory-mapped set, read as they are asked for by their place among ``rows``."""

    def __init__(self, images: np.ndarray, rows: np.ndarray) -> None:
        self.images, self.rows = images, rows

    def read(self, places: Tensor) -> Tensor:
        found = _tensor(self.images[self.rows[places.numpy()]])
        release(self.images)
        return found


def _checked_rows(images: ImageSet, indices: Sequence[int] | np.ndarray, batch_size: int) -> np.ndarray:
    if batch_size < 1:
        raise InputError(f"batches of {batch_size}; expected 1 or more")
    rows = np.array(indices, dtype=np.int64)
    if rows.ndim != 1:
        raise InputError(f"indices have shape {rows.shape}; expected (N,)")
    if rows.size and (rows.min() < 0 or rows.max() >= len(images)):
        raise InputError(f"indices in {rows.min()}..{rows.max()}; expected 0..{len(images) - 1}")
    return rows


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor of an array; read-only memory (a memory map's) is copied, as tensors are always writable."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
