"""Generated data sets, stored as PNG files in class folders so that they load like any other data set."""

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

Batches = Iterable[tuple[Tensor, NDArray[np.int64]]]
"""Images (B, C, H, W) in [0, 1] with labels."""


def write_image_folder(
    folder: Path, settings: Mapping[str, Any], splits: Mapping[str, Batches], *, total: int, progress: Progress = SILENT
) -> str:
    """Write images as ``folder/<split>/<label>/<number>.png`` and return the spec of the data set.

    A complete folder with the same ``settings`` is reused and a partial one is rewritten. A folder with other settings
    raises ``InputError``.
    """
    note = folder.with_suffix(".json")
    if note.exists():
        if read_json(note) != dict(settings):
            raise InputError(f"{folder} contains images generated with other settings; choose another work directory")
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
    write_json(note, dict(settings))
    return f"folder:{folder}"
