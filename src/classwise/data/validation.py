"""The validation images of a finished training."""

# N examples

from __future__ import annotations

from pathlib import Path

from classwise.core.progress import SILENT, Progress
from classwise.data.arrays import ImageSet
from classwise.data.load import load_data
from classwise.metrics.counts import Ints
from classwise.storage.run_directory import RunDirectory


def validation_images(run: Path, progress: Progress = SILENT) -> tuple[ImageSet, Ints] | None:
    """The validation images of a run's training, or None if it had none or the data set has changed."""
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
