"""The images a repair is fitted to, and those it is judged on. The two are never the same."""

# N examples

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classwise.data import ImageSet, balanced_subset, load_data
from classwise.errors import InputError
from classwise.files import digest
from classwise.metrics.counts import Ints
from classwise.progress import SILENT, Progress
from classwise.rundir import RunDirectory

TEST = "test"
MOST_SHARED = 0.01
"""Share of the images to judge that may also be among those of the fit; data sets hold some images twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingImages:
    """Where a repair takes its images from."""

    images: ImageSet
    index: Ints
    train: Ints
    """The images of the model's own training where they are known, else ``index``."""
    origin: str
    notes: list[str]


def fitting_images(
    data: Any,
    *,
    run: Path | None,
    split: str | None,
    per_class: int | None,
    seed: int,
    progress: Progress = SILENT,
) -> FittingImages:
    """The images to fit: those a run held out, or the named split of other data. The test split is refused."""
    if split == TEST:
        raise InputError(
            "a repair is never fitted to the test split, which judges it: name another, as --split train; for the "
            "model of a run directory its own validation images are the default"
        )
    directory = None if run is None else RunDirectory(run)
    made = {} if directory is None else directory.made()
    named = isinstance(data, str | Path)
    images = load_data(data, split=split or ("train" if named else "fit"), progress=progress)
    known = made.get("data_digest") is not None and made.get("data_digest") == images.digest()
    if directory is not None and known and directory.validation.is_file() and split in (None, "train"):
        index = directory.held_out(len(images))
        if not len(index):
            raise InputError(
                f"{run} held out no validation images (validation_per_class = 0): name a split of other images with "
                "--split"
            )
        train = np.setdiff1d(np.arange(len(images)), index)
        return FittingImages(
            images=images,
            index=_some(images, index, per_class, seed),
            train=train,
            origin="held out by its training",
            notes=[],
        )
    if named and split is None:
        raise InputError(
            "the model is not that of a run directory on this data, so its validation images are not known: name a "
            "split to fit that is not the test split, as --split validation (or --split train, which is optimistic)"
        )
    notes = []
    if split == "train":
        notes = [
            "If the model was trained on the images of this split, its accuracy on them is too high, in some classes "
            "more than in others, and so is what the fit promises."
        ]
    whole = np.arange(len(images))
    index = _some(images, whole, per_class, seed)
    return FittingImages(
        images=images, index=index, train=index, origin="as given" if split is None else "split as named", notes=notes
    )


def validation_images(run: Path, progress: Progress = SILENT) -> tuple[ImageSet, Ints] | None:
    """The images that the training of a run held out, where it did and they are at hand."""
    directory = RunDirectory(run)
    made = directory.made()
    data = made.get("asked", {}).get("data")
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not directory.validation.is_file():
        return None
    images = load_data(name, split="train", progress=progress)
    if images.digest() != made.get("data_digest"):
        return None
    index = directory.held_out(len(images))
    return (images, index) if len(index) else None


def images_to_judge(data: Any, test: Any, fitting: FittingImages, progress: Progress) -> ImageSet:
    """The images a repair is judged on: ``test`` where given, else the test split of named data."""
    if test is None and not isinstance(data, str | Path):
        raise InputError("there are no test images to judge the repair on: pass them as test, or set verdict to False")
    images = load_data(data if test is None else test, split=TEST, progress=progress)
    fitted = {digest(fitting.images.images[row].tobytes()) for row in fitting.index}
    shared = sum(digest(image.tobytes()) in fitted for _, some in images.chunks() for image in some)
    if shared > MOST_SHARED * len(images):
        raise InputError(
            f"{shared} of {len(images)} images to judge on are among those of the fit: pass others as test"
        )
    return images


def _some(images: ImageSet, index: Ints, per_class: int | None, seed: int) -> Ints:
    """All of the images at ``index``, or this many random ones of each class."""
    if per_class is None:
        return index
    if per_class < 1:
        raise InputError(f"per_class must be at least 1, got {per_class}")
    labels = images.labels[index]
    return np.asarray(index[balanced_subset(labels, per_class, int(images.labels.max()) + 1, seed)])
