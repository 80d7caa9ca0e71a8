"""Run the probes on a sample of the images of an evaluation."""

# N examples

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from classwise.core.errors import InputError
from classwise.evaluation.stages import Run
from classwise.evaluation.trust.findings import warning_codes
from classwise.evaluation.trust.probes import QUERIES, choose, examine
from classwise.reporting.sanity import Probes
from classwise.storage.verdicts import NATURAL

NATURAL_SAMPLE = 200
"""Number of images, correctly classified or not, on which other input scales are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The measurements, or the reason why there are none."""

    probes: Probes | None = None
    failure: str | None = None

    @property
    def warnings(self) -> list[str]:
        """Codes of the warnings."""
        return ["not-probed"] if self.failure is not None else warning_codes(self.probes)


def run_probes(run: Run, *, black_box: bool) -> ProbeResult:
    """Probe the model on a few images that it classifies correctly, equally many of each class.

    ``black_box`` includes the attack without gradients. A model that fails under the probes can still be evaluated.
    """
    verdicts, batch_size = run.verdicts, run.loop.size
    rows = choose(verdicts.label, verdicts.survived(NATURAL))
    if not len(rows):
        return ProbeResult()
    x, y, index = run.batch(rows)
    some = np.linspace(0, len(verdicts) - 1, min(NATURAL_SAMPLE, len(verdicts)), dtype=int)
    natural = run.batch(some)[:2]
    while True:
        try:
            probes = examine(
                run.model,
                x,
                y,
                index=index,
                threat=run.threat,
                seed=run.seed,
                queries=QUERIES if black_box else 0,
                natural=natural,
                batch_size=batch_size,
                progress=run.loop.progress,
            )
        except torch.OutOfMemoryError:
            if batch_size == 1:
                return ProbeResult(failure="out of memory at batch size 1")
            batch_size = min(batch_size, len(x)) // 2 or 1
        except InputError as error:
            return ProbeResult(failure=str(error))
        else:
            return ProbeResult(probes=probes)
