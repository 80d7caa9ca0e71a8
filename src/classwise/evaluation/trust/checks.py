"""Run the trust checks of an evaluation: the probes first, and the findings when the verdicts are complete."""

# N examples

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import Progress
from classwise.core.threat import Threat
from classwise.data import ImageSet, ordered
from classwise.evaluation.trust.findings import warning_codes
from classwise.evaluation.trust.probes import QUERIES, choose, examine
from classwise.reporting.sanity import Probes
from classwise.storage.verdicts import NATURAL, Verdicts

NATURAL_SAMPLE = 200
"""Images, correctly classified or not, on which other input scales are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The measurements, or why there are none."""

    probes: Probes | None = None
    failure: str | None = None

    @property
    def warnings(self) -> list[str]:
        """Codes of the warnings."""
        return ["not-probed"] if self.failure is not None else warning_codes(self.probes)


def run_probes(
    model: nn.Module,
    images: ImageSet,
    verdicts: Verdicts,
    threat: Threat,
    *,
    seed: int,
    black_box: bool,
    batch_size: int,
    progress: Progress,
) -> ProbeResult:
    """Probe a model on a few images that it classifies correctly, as many of each class.

    ``black_box`` includes the attack without gradients. A model that fails under the probes can still be evaluated.
    """
    device = device_of(model)
    rows = choose(verdicts.label, verdicts.survived(NATURAL))
    if not len(rows):
        return ProbeResult()
    x, y, index = next(ordered(images, verdicts.index[rows], len(rows), device))
    some = np.linspace(0, len(verdicts) - 1, min(NATURAL_SAMPLE, len(verdicts)), dtype=int)
    natural, labels, _ = next(ordered(images, verdicts.index[some], len(some), device))
    while True:
        try:
            probes = examine(
                model,
                x,
                y,
                index=index,
                threat=threat,
                seed=seed,
                queries=QUERIES if black_box else 0,
                natural=(natural, labels),
                batch_size=batch_size,
                progress=progress,
            )
        except torch.OutOfMemoryError:
            if batch_size == 1:
                return ProbeResult(failure="out of memory at batch size 1")
            batch_size = min(batch_size, len(x)) // 2 or 1
        except InputError as error:
            return ProbeResult(failure=str(error))
        else:
            return ProbeResult(probes=probes)
