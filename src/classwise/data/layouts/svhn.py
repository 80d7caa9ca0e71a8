"""The published layout of SVHN's cropped digits: one MATLAB file for each split."""

# N examples

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from classwise.core.errors import InputError, one_line
from classwise.data.datasets import DatasetCard
from classwise.data.layouts.base import Layout, required_files
from classwise.data.sources import Reading

MAX_COUNT = 10**5
"""Files with more images are refused before they are unpacked; the larger published one has 73,257."""


@dataclass(frozen=True, kw_only=True)
class SvhnMat(Layout):
    """``X`` (32, 32, 3, N) and ``y`` (N, 1), in which 10 is the digit 0."""

    def files(self, folder: Path, split: str) -> list[Path]:
        return required_files(folder, [f"{split}_32x32.mat"], ["train_32x32.mat", "test_32x32.mat"])

    def open(self, folder: Path, split: str, card: DatasetCard) -> Reading:
        from scipy.io import loadmat, whosmat  # slow to import

        (file,) = self.files(folder, split)
        try:
            variables = {name: (shape, kind) for name, shape, kind in whosmat(file)}
            shape, kind = variables.get("X", ((), ""))
            count = shape[3] if len(shape) == 4 else 0
            expected = shape[:3] == (32, 32, 3) and kind == "uint8" and 0 < count <= MAX_COUNT
            if not expected or variables.get("y", ((), ""))[0] != (count, 1):
                raise InputError(f"{file}: contains {variables}; expected X (32, 32, 3, N) of uint8 and y (N, 1)")
            found = loadmat(file, variable_names=["X", "y"])
        except InputError:
            raise
        except Exception as error:  # scipy raises many kinds of exceptions on damaged files
            raise InputError(f"{file}: not a readable MATLAB file: {one_line(error)}") from error
        labels = found["y"][:, 0]
        if labels.dtype.kind not in "iu":
            raise InputError(f"{file}: labels are {labels.dtype}; expected integers")
        labels = np.where(labels == 10, 0, labels).astype(np.int64)
        return Reading(count, card.shape, card.classes, [(found["X"].transpose(3, 2, 0, 1), labels)])
