"""Batches on the device: shuffled and augmented for training, in order for evaluation."""

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
"""Training data up to this size is kept on the device."""
READ_AHEAD = 2
"""Batches that are read from disk in advance."""


def to_float(images: np.ndarray | Tensor) -> Tensor:
    """Return images as float32 in [0, 1], bit-identical on every device; float32 tensors are returned unchanged."""
    tensor = images if isinstance(images, Tensor) else _tensor(images)
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    if tensor.dtype != torch.uint8:
        raise InputError(f"images are {tensor.dtype}; expected uint8 or floating point")
    # The divisor is a tensor because CUDA replaces division by a Python number with a rounded reciprocal.
    return tensor.to(torch.float32) / torch.full((), 255.0, device=tensor.device)


def ordered(
    images: ImageSet,
    indices: Sequence[int] | np.ndarray | None,
    batch_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> Iterator[Batch]:
    """Yield the examples at ``indices`` (None: all) in that order, without augmentation; the last batch may be smaller.

    ``size`` takes a center crop of that many pixels from each image.
    """
    rows = _checked_rows(images, np.arange(len(images)) if indices is None else indices, batch_size)
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        x = _tensor(middle(images.images[chunk], size)).to(device, non_blocking=True)
        y = _tensor(images.labels[chunk]).to(device, non_blocking=True)
        release(images.images)
        yield to_float(x).to(dtype), y, _tensor(chunk).to(device, non_blocking=True)


def share_of(length: int, share: tuple[int, int]) -> slice:
    """Return the slice of the i-th of n parts of a sequence; their lengths differ by at most one."""
    i, n = share
    return slice(i * length // n, (i + 1) * length // n)


class Batches:
    """Training batches; each iteration is one epoch in a new order.

    The images are kept on the device. A memory-mapped set of more than ``RESIDENT_BYTES`` stays on disk, and batches
    are read in advance.

    All random numbers of an epoch are drawn from ``generator``, on its device, before the first batch. With a
    generator on the CPU, order, crops and flips are therefore the same on every device, and a resumed run needs only
    its state at the start of the epoch.
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
        """``indices`` selects examples of the set (None: all); ``crop`` is the padding of random crops.

        ``part`` takes random crops of at least that fraction of the area, resized to ``size`` pixels (None: the size of
        the images). ``share = (i, n)`` yields only the i-th of n parts of every batch, for one of n processes that draw
        the same random numbers.
        """
        rows = _checked_rows(images, np.arange(len(images)) if indices is None else indices, batch_size)
        if not len(rows):
            raise InputError("no examples are selected; expected at least one")
        if crop < 0:
            raise InputError(f"crop = {crop}; expected 0 or more pixels of padding")
        if part is not None and crop:
            raise InputError("part and crop are both given; expected at most one of them")
        if size is not None and part is None:
            raise InputError(f"size = {size} without part; set part to the smallest fraction of the area")
        if drop_last and len(rows) < batch_size:
            raise InputError(
                f"{len(rows)} examples are fewer than the batch size {batch_size}; no batch is left with drop_last"
            )
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
        """Weights (K,) by which an epoch draws classes, and then examples of the class uniformly, with replacement.

        None yields every example once. Classes without examples are never drawn. Can be set between epochs.
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
                raise InputError(f"sampling weights {weights.tolist()}; expected finite, nonnegative numbers")
            if not bool((weights[: len(self._counts)] * (self._counts > 0)).any()):
                raise InputError(
                    f"sampling weights {weights.tolist()} are zero for all classes with examples; expected at least "
                    "one positive"
                )
        self._sampling = weights

    @property
    def examples(self) -> int:
        """The number of examples of an epoch."""
        return len(self._by_class)

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        order = self._order().cpu()
        crops = self._crops().to(self.device, non_blocking=True)
        mirror = torch.zeros(self.examples, dtype=torch.bool)
        if self.flip:
            mirror = torch.rand(self.examples, generator=self.generator, device=self.generator.device) < 0.5
        mirror = mirror.to(self.device, non_blocking=True)
        parts, on_device = self._parts(), order.to(self.device, non_blocking=True)
        with closing(self._read(order, on_device, parts)) as images:  # also stops reading if the caller stops early
            for where, x in zip(parts, images, strict=True):
                rows = on_device[where]
                yield self._augmented(x, crops[:, where], mirror[where]), self._labels[rows], self._indices[rows]

    def share_position(self, number: int) -> tuple[int, int]:
        """Return how many examples of a full batch precede this process's share, and the size of the full batch."""
        whole = min(self.batch_size, self.examples - number * self.batch_size)
        return share_of(whole, self.share).start, whole

    def _parts(self) -> list[slice]:
        """Return the examples of each batch, or this process's share of it, as slices of the epoch."""
        parts = []
        for number in range(len(self)):
            start, mine = number * self.batch_size, share_of(self.share_position(number)[1], self.share)
            parts.append(slice(start + mine.start, start + mine.stop))
        return parts

    def _read(self, order: Tensor, on_device: Tensor, parts: Sequence[slice]) -> Generator[Tensor, None, None]:
        """Yield the images of each slice of the epoch's order, given on the CPU and on the device."""
        if isinstance(self._images, Tensor):
            for where in parts:
                yield self._images[on_device[where]]
            return
        waiting: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(1, "read ahead") as reader:
            for number in range(len(parts) + READ_AHEAD):
                if number < len(parts):
                    waiting.append(reader.submit(self._images.read, order[parts[number]]))
                if number >= READ_AHEAD:
                    yield waiting.popleft().result().to(self.device, non_blocking=True)

    def _crops(self) -> Tensor:
        """Draw the crop of each image of an epoch."""
        device = self.generator.device
        if self.part is not None:
            return torch.rand((4, self.examples), generator=self.generator, device=device)
        if self.crop:
            return torch.randint(2 * self.crop + 1, (2, self.examples), generator=self.generator, device=device)
        return torch.zeros((2, self.examples), dtype=torch.int64)

    def _augmented(self, x: Tensor, crops: Tensor, mirror: Tensor) -> Tensor:
        """Return the augmented images."""
        if self.part is not None:
            parts = random_parts(crops, self.part, *x.shape[2:])
            return resample(to_float(x), parts, mirror, self.size)
        if self.crop or self.flip:
            x = augment(x, crops[0], crops[1], mirror, self.crop)
        return to_float(x)

    def _order(self) -> Tensor:
        """Draw the order of an epoch: (N,) rows of the stored images."""
        device = self.generator.device
        if self._sampling is None:
            return torch.randperm(self.examples, generator=self.generator, device=device)
        weights = self._sampling[: len(self._counts)] * (self._counts > 0)
        classes = torch.multinomial(weights.to(device), self.examples, True, generator=self.generator).cpu()
        draws = torch.rand(self.examples, generator=self.generator, device=device, dtype=torch.float64).cpu()
        within = (draws * self._counts[classes]).long()
        first = self._counts.cumsum(0) - self._counts
        return self._by_class[first[classes] + within]


class MixedBatches:
    """Batches concatenated from two sources; an epoch has the length of the first."""

    def __init__(self, first: Batches, second: Batches) -> None:
        self.first, self.second = first, second

    @property
    def sampling(self) -> Tensor | None:
        """The sampling weights of the first source."""
        return self.first.sampling

    @sampling.setter
    def sampling(self, weights: Tensor | None) -> None:
        self.first.sampling = weights

    def __len__(self) -> int:
        return len(self.first)

    def share_position(self, number: int) -> tuple[int, int]:
        """Return how many examples of a full batch precede this process's share, and the size of the full batch."""
        (before, whole), (more_before, more) = self.first.share_position(number), self.second.share_position(0)
        return before + more_before, whole + more

    def __iter__(self) -> Iterator[Batch]:
        """Yield one epoch of the first source. The second starts again with every epoch and whenever it is exhausted.

        Indices of the second source are offset by the size of the first.
        """
        beyond = len(self.first.images)
        for (x, y, index), (more_x, more_y, more) in zip(self.first, _endless(self.second), strict=False):
            yield torch.cat([x, more_x]), torch.cat([y, more_y]), torch.cat([index, more + beyond])


def _endless(batches: Batches) -> Iterator[Batch]:
    while True:
        yield from batches


class _OnDisk:
    """Images of a memory-mapped set, read on demand by their positions in ``rows``."""

    def __init__(self, images: np.ndarray, rows: np.ndarray) -> None:
        self.images, self.rows = images, rows

    def read(self, positions: Tensor) -> Tensor:
        found = _tensor(self.images[self.rows[positions.numpy()]])
        release(self.images)
        return found


def _checked_rows(images: ImageSet, indices: Sequence[int] | np.ndarray, batch_size: int) -> np.ndarray:
    if batch_size < 1:
        raise InputError(f"batch_size = {batch_size}; expected 1 or more")
    rows = np.array(indices, dtype=np.int64)
    if rows.ndim != 1:
        raise InputError(f"indices have shape {rows.shape}; expected (N,)")
    if rows.size and (rows.min() < 0 or rows.max() >= len(images)):
        raise InputError(f"indices are in {rows.min()}..{rows.max()}; expected 0..{len(images) - 1}")
    return rows


def _tensor(array: np.ndarray) -> Tensor:
    """Return a tensor of an array; read-only (memory-mapped) arrays are copied, because tensors are writable."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
