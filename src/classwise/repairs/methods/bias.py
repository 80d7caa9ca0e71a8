"""Class biases on the last layer, fitted to the frontier of the average against the worst class.

A targeted margin attack towards class j lowers z_y - z_j. Biases b change that loss by the constant b_y - b_j, so
neither its gradient nor the image it finds depends on b. With the smallest margins m_j(x) over the ball, an image stays
correct under every such attack exactly if m_j(x) + b_y - b_j > 0 for all j: one search gives the robust accuracy of
every class under every b (``classwise.repairs.fit``).

This is exact up to the strength of the search, for Linf, L2 and any other threat model. It does
not hold for rescaled rows of the last layer, which change the gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from classwise.data import ordered
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.models.heads import with_biases
from classwise.repairs.fit import fit
from classwise.repairs.methods.base import Case, Images, Repaired


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Class biases from the margin matrix of held-out images."""

    about: ClassVar[str] = "Class biases on the last layer, selected on the frontier of average against worst class"
    uses: ClassVar[Images] = "validation"

    def __call__(self, case: Case) -> Repaired:
        began = time.perf_counter()
        margins = find_margins(
            case.model,
            case.images,
            case.index,
            case.threat,
            settings=MarginSettings(seed=case.seed, targets=case.targets),
            batch_size=case.batch_size,
            engine=case.engine,
            file=case.margins_file,
            known=case.known_margins,
            progress=case.progress,
        )
        searched = time.perf_counter()
        fitted = fit(margins, rule=case.rule, floor=case.floor, seed=case.seed)
        done = time.perf_counter()
        x = next(ordered(case.images, case.index[:16], 16))[0]
        biases = torch.from_numpy(np.asarray(fitted.biases, dtype=np.float32))
        model, layer = with_biases(case.model, biases, x)
        return Repaired(
            model=model,
            layer=layer,
            fit=fitted,
            margins=margins,
            seconds={"margins": round(searched - began, 3), "fit": round(done - searched, 3)},
        )
