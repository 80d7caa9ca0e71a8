"""Data sets made from others, kept as PNG files in class folders, so that they are data sets like any other."""

# N examples

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.storage.files import read_json, write_json

Labelled = Iterable[tuple[Tensor, NDArray[np.int64]]]
"""Batches of images (B, C, H, W) in [0, 1] with labels."""


def kept(
    folder: Path, how: Mapping[str, Any], splits: Mapping[str, Labelled], *, total: int, progress: Progress = SILENT
) -> str:
    """Write images as ``folder/<split>/<label>/<number>.png``, unless they lie there already; the spec of the data set.

    ``how`` is all that decides what the images look like. A folder half written is begun anew, one that was made in
    another way is left alone.
    """
    note = folder.with_suffix(".json")
    if note.exists():
        if read_json(note) != dict(how):
            raise InputError(f"{folder} holds images made in another way: choose another work")
        return f"folder:{folder}"
    shutil.rmtree(folder, ignore_errors=True)
    progress.start(f"write {folder.name}", total)
    for split, batches in splits.items():
        number = 0
        for x, labels in batches:
            pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
            for image, label in zip(pixels, labels, strict=True):
                place = folder / split / f"{label:04d}"
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(place / f"{number:06d}.png")
                number += 1
            progress.advance(len(labels))
    progress.finish()
    write_json(note, dict(how))
    return f"folder:{folder}"
