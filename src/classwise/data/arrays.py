"""``ImageSet``: images and labels as checked arrays, the form in which all packages use data."""

# N examples, C channels, H height, W width

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from classwise.core.errors import InputError
from classwise.storage.files import digest

CHUNK_BYTES = 16 * 2**20
"""Bytes that are read at a time, so that a memory-mapped set never has to fit into memory."""

ROUNDING = 1e-6
"""The tolerance of the range [0, 1] for float images, for rounding errors of resizing and division."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """Images with labels, checked when they are constructed and never changed afterwards."""

    name: str
    split: str
    images: np.ndarray
    """(N, C, H, W), uint8 (possibly memory-mapped) or float32 in [0, 1]."""
    labels: np.ndarray
    """(N,) int64, each in 0..K-1."""
    classes: tuple[str, ...] | None = None
    """The K class names; None if neither the names nor K are known."""

    def __post_init__(self) -> None:
        if self.classes is not None:
            # A folder name may be bytes that are not valid text, which cannot be written to JSON.
            names = (str(name).encode(errors="replace").decode() for name in self.classes)
            object.__setattr__(self, "classes", tuple(names))
        object.__setattr__(self, "labels", self._checked_labels())
        object.__setattr__(self, "images", self._checked_images())

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape))
        return f"ImageSet({self.name} {self.split}, {shape} {self.images.dtype})"

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageSet:
        """Return the examples at ``indices``, in that order and in memory."""
        rows = np.asarray(indices)
        if rows.size == 0:
            raise InputError(f"{self._name} no examples are selected")
        if rows.dtype.kind != "b" and ((wrong := (rows < 0) | (rows >= len(self))).any()):
            raise InputError(f"{self._name} index {rows[wrong][0]} is out of range; expected 0..{len(self) - 1}")
        return ImageSet(
            name=self.name,
            split=self.split,
            images=np.asarray(self.images[rows]),
            labels=self.labels[rows],
            classes=self.classes,
        )

    def digest(self) -> str:
        """Return a fingerprint of pixels and labels, independent of names."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        parts = [digest(np.ascontiguousarray(chunk).data.cast("B")) for _, chunk in self.chunks()]
        return digest(f"{self.images.dtype.str} {self.images.shape}", self.labels.data, *parts)

    def counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of examples of each class, (K,)."""
        _check_range(self.labels, num_classes, self._name)
        return np.bincount(self.labels, minlength=num_classes).astype(np.int64, copy=False)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the images in chunks, each with the index of its first image."""
        # From the shape alone: the digest must not depend on the memory layout of the array.
        rows = max(1, CHUNK_BYTES // max(1, self.images[0].nbytes))
        for start in range(0, len(self.images), rows):
            yield start, self.images[start : start + rows]
            release(self.images)

    @property
    def _name(self) -> str:
        return f"{self.name} ({self.split}):"

    def _checked_labels(self) -> NDArray[np.int64]:
        labels = np.asarray(self.labels)
        if labels.dtype.kind in "USO":
            first = next(iter(labels.ravel()[:1].tolist()), None)
            raise InputError(
                f"{self._name} labels are text or objects such as {first!r}; expected integers from 0: map the class "
                "names to numbers"
            )
        if labels.ndim == 0:
            raise InputError(f"{self._name} labels are a single number; expected an array of shape (N,)")
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            hint = "; if they are one-hot, pass argmax(1)" if labels.ndim == 2 else ""
            raise InputError(
                f"{self._name} labels are {labels.dtype} of shape {labels.shape}; expected integers from 0 of shape "
                f"(N,){hint}"
            )
        _check_range(labels, None if self.classes is None else len(self.classes), self._name)
        return np.ascontiguousarray(labels, dtype=np.int64)

    def _checked_images(self) -> np.ndarray:
        images = self.images
        if not isinstance(images, np.ndarray) or images.ndim != 4:
            raise InputError(f"{self._name} images have shape {np.shape(images)}; expected (N, C, H, W)")
        if images.dtype not in (np.uint8, np.float32):
            raise InputError(f"{self._name} images are {images.dtype}; expected uint8, or float32 in [0, 1]")
        if len(images) != len(self.labels):
            raise InputError(f"{self._name} {len(images)} images but {len(self.labels)} labels")
        if images.size == 0:
            raise InputError(
                f"{self._name} images have shape {images.shape}; expected at least one image and one pixel"
            )
        if images.dtype == np.uint8:
            return images
        low, high = np.inf, -np.inf
        for start, chunk in self.chunks():
            smallest, largest = float(chunk.min()), float(chunk.max())
            if np.isnan(smallest):  # the minimum of anything with a NaN is NaN
                index = start + int(np.isnan(chunk).any(axis=(1, 2, 3)).argmax())
                raise InputError(f"{self._name} image {index} has NaN pixels")
            low, high = min(low, smallest), max(high, largest)
        if low < -ROUNDING or high > 1 + ROUNDING:
            if low >= -ROUNDING and high <= 255 + ROUNDING:
                hint = "divide by 255"
            else:
                hint = "if they are normalized, move the normalization into the model"
            raise InputError(f"{self._name} pixels lie in [{low:.6g}, {high:.6g}]; expected [0, 1]; {hint}")
        return images if low >= 0 and high <= 1 else images.clip(0, 1)


def release(images: np.ndarray) -> None:
    """Release the resident memory of a memory-mapped array; pages are read again when needed.

    Without this, the memory of a process that iterates over a memory-mapped set grows to the size of the set.
    """
    mapped = getattr(images, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _check_range(labels: np.ndarray, num_classes: int | None, prefix: str) -> None:
    """Require labels in 0..K-1, or only nonnegative ones if the number of classes is unknown."""
    wrong = labels < 0
    if num_classes is not None:
        wrong |= labels >= num_classes
    if wrong.any():
        index = int(wrong.argmax())
        expected = f"0..{num_classes - 1} ({num_classes} classes)" if num_classes is not None else "0 or more"
        raise InputError(f"{prefix} label {labels[index]} at index {index}; expected {expected}")
