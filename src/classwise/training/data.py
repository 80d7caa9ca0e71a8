"""The images of a training: phases, the validation split, extra images and their labels."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from classwise.config.recipes import PhaseChoice, Recipe
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.types import Task
from classwise.data import ImageSet, balanced_split, balanced_subset, load_data, ordered
from classwise.evaluation.judge import predict
from classwise.metrics.counts import Ints
from classwise.models.load import load_model, run_directory
from classwise.storage.files import digest
from classwise.storage.run_directory import RunDirectory

LABELING_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive epochs on images of one size, in batches of one size.

    All phases have the same images in the same order, at different sizes. Wong et al. (Fast is better than free, ICLR
    2020) train on small images first, after DAWNBench.
    """

    epochs: int
    images: ImageSet
    batch_size: int
    crop: int
    """Pixels of zero padding before a random crop back to size."""
    part: float | None = None
    """Alternative to ``crop``: images are random parts of at least this share of the area."""
    size: int | None = None
    """Pixels to which parts are resized, and the center crop for validation; None: the size of the images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the model's input."""
        channels, *sides = self.images.images.shape[1:]
        height, width = sides if self.size is None else (self.size, self.size)
        return channels, height, width


def phase_at(phases: Sequence[Phase], epoch: int) -> int:
    """Return the number of the phase of an epoch, both counted from 0; the last phase for epochs beyond the last."""
    return sum(epoch >= end for end in list(accumulate(phase.epochs for phase in phases))[:-1])


def load_phases(recipe: Recipe, progress: Progress, processes: int = 1) -> tuple[Phase, ...]:
    """Load the images of every phase; a recipe without phases has one."""
    phases: list[Phase] = []
    for choice in recipe.phases or [PhaseChoice(epochs=recipe.epochs)]:
        spec = recipe.data.name if choice.data is None else choice.data
        phase = Phase(
            epochs=choice.epochs,
            images=load_data(spec, split="train", progress=progress),
            batch_size=recipe.batch_size if choice.batch_size is None else choice.batch_size,
            crop=recipe.augment.crop if choice.crop is None else choice.crop,
            part=recipe.augment.part,
            size=recipe.augment.size if choice.size is None else choice.size,
        )
        phases.append(phase)
        if phase.batch_size // (1 if recipe.data.extra is None else 2) < processes:
            raise InputError(
                f"batch_size = {phase.batch_size} is too small for {processes} processes: each needs at least one image"
            )
        first, pixels = phases[0].images, min(phase.images.images.shape[2:])
        if not np.array_equal(phase.images.labels, first.labels) or phase.images.classes != first.classes:
            raise InputError(f"phase {len(phases)} has different examples ({spec}) from phase 1")
        if phase.crop >= pixels:
            raise InputError(f"augment.crop = {phase.crop} must be smaller than the image ({pixels} pixels)")
        if phase.crop and phase.part is not None:
            raise InputError("augment.crop and augment.part are mutually exclusive: set only one")
        if phase.size is not None and phase.part is None:
            raise InputError(f"size = {phase.size} applies to random parts: set augment.part")
        if phase.size is not None and phase.size > pixels:
            raise InputError(f"size = {phase.size} is larger than the images of {spec} ({pixels} pixels)")
    if recipe.data.extra is not None and len({phase.shape for phase in phases}) > 1:
        raise InputError("data.extra needs phases of one image size")
    return tuple(phases)


def split_images(recipe: Recipe, images: ImageSet, task: Task) -> tuple[Ints, Ints]:
    """Return the indices of the images to train on and of those held out for validation.

    A warm start from a run on the same images holds out what that run held out: its weights have seen all others.
    """
    train, validation = balanced_split(images.labels, recipe.validation_per_class, recipe.seed, task.num_classes)
    found = None if recipe.start is None else run_directory(recipe.start)
    if found is not None and len(validation):
        previous = RunDirectory(found[0])
        if previous.read().get("training", {}).get("data_digest") == images.digest():
            held_out = previous.held_out(len(images))
            if len(held_out):
                train, validation = np.setdiff1d(np.arange(len(images)), held_out), held_out
    if recipe.data.without_class is not None:
        excluded = images.labels == task.label(recipe.data.without_class)
        train, validation = train[~excluded[train]], validation[~excluded[validation]]
    if recipe.data.per_class is not None:
        train = train[balanced_subset(images.labels[train], recipe.data.per_class, task.num_classes, recipe.seed)]
    return train, validation


def load_extra_images(
    recipe: Recipe, images: ImageSet, validation: Ints, device: torch.device, progress: Progress
) -> ImageSet | None:
    """Load the recipe's extra images without copies of validation images, with a model's labels if it names one."""
    if recipe.data.extra is None:
        if recipe.data.labeler is not None:
            raise InputError("data.labeler labels extra images: set data.extra")
        return None
    extra = load_data(recipe.data.extra, split="train", progress=progress)
    shapes = [one.images.shape[1:] for one in (images, extra)]
    if shapes[0] != shapes[1]:
        raise InputError(f"extra images are {shapes[1]} (channels, height, width), the others {shapes[0]}")
    if extra.images.dtype != images.images.dtype:
        raise InputError(f"extra images are {extra.images.dtype}, the others {images.images.dtype}")
    held_out = {digest(images.images[index].tobytes()) for index in validation}
    if held_out:
        keep = [digest(image.tobytes()) not in held_out for _, chunk in extra.chunks() for image in chunk]
        extra = extra if all(keep) else extra.take(np.flatnonzero(keep))
    if recipe.data.labeler is None:
        return extra
    num_classes = None if images.classes is None else len(images.classes)
    labeler = load_model(recipe.data.labeler, num_classes=num_classes, in_channels=images.images.shape[1]).to(device)
    return pseudo_labeled(labeler, extra, images.classes, progress)


def pseudo_labeled(
    model: nn.Module, images: ImageSet, classes: tuple[str, ...] | None, progress: Progress = SILENT
) -> ImageSet:
    """Replace labels by a model's predictions: the first step of robust self-training (Carmon et al. 2019)."""
    device, predictions = device_of(model), []
    progress.start("label extra images", len(images))
    for x, _, _ in ordered(images, None, LABELING_BATCH, device):
        predictions.append(predict(model, x))
        progress.advance(len(x))
    progress.finish()
    return replace(images, labels=np.concatenate(predictions), classes=classes)
