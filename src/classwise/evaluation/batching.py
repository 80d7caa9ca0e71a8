"""Work on examples batch by batch, in smaller batches after a lack of memory."""

# N examples

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints


def in_batches(
    task: str,
    pending: Bools,
    batch_size: int,
    fill: Callable[[Ints], None],
    after: Callable[[], None],
    smaller: Callable[[int], None],
    progress: Progress,
) -> None:
    """Call ``fill`` with the pending rows in batches of equal size, and ``after`` each batch.

    When memory runs out, ``smaller`` is called with half the batch's size and the same rows are tried again.
    """
    rows = np.flatnonzero(pending)
    progress.start(task, len(pending), len(pending) - len(rows))
    while len(rows):
        batch = rows[: math.ceil(len(rows) / math.ceil(len(rows) / batch_size))]
        try:
            fill(batch)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise InputError(f"{task}: out of memory at batch size 1") from error
            batch_size = len(batch) // 2
            smaller(batch_size)
            progress.advance(0, f"out of memory: continuing with batches of {batch_size}")
            continue
        rows = rows[len(batch) :]
        progress.advance(len(batch))
        after()
    progress.finish()
