"""Fitting and test images of a repair."""

# N examples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.data import ImageSet, balanced_subset, load_data
from classwise.metrics.counts import Ints
from classwise.storage.files import digest
from classwise.storage.run_directory import RunDirectory

TEST = "test"
MOST_SHARED = 0.01
"""Fraction of test images that may also be fitting images: some data sets contain duplicates."""

MAY_BE_TRAINED_ON = (
    "If the model was trained on the fitting images, its accuracy on them is too high, by different amounts in "
    "different classes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingImages:
    """The images that a repair is fitted to."""

    images: ImageSet
    index: Ints
    """Validation images: held out of the model's training if that is known."""
    train: Ints
    """Training images: the model's own if known, else ``index``."""
    origin: str = "data passed by the caller"
    notes: Sequence[str] = ()


def fitting_images(
    data: Any,
    *,
    model: str,
    run: RunDirectory | None,
    split: str | None,
    per_class: int | None,
    seed: int,
    progress: Progress = SILENT,
) -> FittingImages:
    """The validation images of a run, or the named split of other data. The split ``test`` is refused."""
    if split == TEST:
        raise InputError(
            "split 'test' is reserved for the test evaluation: pass another split, or none to fit to the validation "
            "images of a run directory"
        )
    made = {} if run is None else run.producer()
    named = isinstance(data, str | Path)
    images = load_data(data, split=split or ("train" if named else "fit"), progress=progress)
    known = made.get("data_digest") is not None and made.get("data_digest") == images.digest()
    if run is not None and known and run.validation.is_file() and split in (None, "train"):
        index = run.held_out(len(images))
        if len(index):
            return FittingImages(
                images=images,
                index=_some(images, index, per_class, seed),
                train=np.setdiff1d(np.arange(len(images)), index),
                origin="validation images of the run",
            )
        if split is None:
            raise InputError(
                f"{run.path} has no validation images (validation_per_class = 0): pass the split to fit to, as --split "
                "train (accuracies on training images are too high)"
            )
    if named and split is None:
        reason = "has no validation.json" if known else "was not trained on this data"
        raise InputError(
            f"{model} {'is not a run directory' if run is None else reason}, so it has no validation images here: "
            "pass the split to fit to (--split train); accuracies on training images are too high"
        )
    index = _some(images, np.arange(len(images)), per_class, seed)
    if split is None:
        return FittingImages(images=images, index=index, train=index)
    notes = [MAY_BE_TRAINED_ON] if split == "train" else []
    return FittingImages(images=images, index=index, train=index, origin="named split", notes=notes)


def test_split(data: Any, test: Any, fitting: FittingImages, progress: Progress) -> ImageSet:
    """The test images: ``test`` if given, else the test split of named data. They must not be fitting images."""
    if test is None and not isinstance(data, str | Path):
        raise InputError("no test images: pass test=(x, y), or evaluate=False")
    images = load_data(data if test is None else test, split=TEST, progress=progress)
    _check_disjoint(images, fitting)
    return images


def check_disjoint(data: Any, fitting: FittingImages, progress: Progress) -> None:
    """Refuse fitting images that are test images of named data, where it has a test split."""
    if not isinstance(data, str | Path):
        return
    try:
        images = load_data(data, split=TEST, progress=progress)
    except InputError:  # no test split to compare with
        return
    _check_disjoint(images, fitting)


def _check_disjoint(images: ImageSet, fitting: FittingImages) -> None:
    fitted = {digest(fitting.images.images[row].tobytes()) for row in fitting.index}
    shared = sum(digest(image.tobytes()) in fitted for _, some in images.chunks() for image in some)
    if shared > MOST_SHARED * len(images):
        raise InputError(
            f"{shared} of {len(images)} test images are also fitting images: choose another split, or pass other test "
            "images"
        )


def _some(images: ImageSet, index: Ints, per_class: int | None, seed: int) -> Ints:
    """All of the images at ``index``, or this many random ones of each class."""
    if per_class is None:
        return index
    labels = images.labels[index]
    return np.asarray(index[balanced_subset(labels, per_class, int(images.labels.max()) + 1, seed)])
