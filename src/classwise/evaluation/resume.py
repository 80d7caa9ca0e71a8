"""Resume an interrupted evaluation from its run directory."""

from __future__ import annotations

from typing import Any

import numpy as np

from classwise.storage.run_directory import RunDirectory, Section
from classwise.storage.verdicts import Verdicts

Costs = dict[str, dict[str, Any]]
"""Examples attacked, results rejected and seconds of each attack or stage, by the name of its column."""


def claim(
    directory: RunDirectory,
    pending: Verdicts,
    fingerprint: str,
    details: dict[str, Any],
    *,
    resume: bool,
    beside: Section | None,
) -> Costs:
    """Claim a directory, fill ``pending`` with the verdicts saved there, and return the effort so far."""
    resumed = directory.claim("evaluation", fingerprint, details, resume=resume, beside=beside)
    if resumed and directory.verdicts.exists():
        saved, saved_fingerprint = Verdicts.load(directory.verdicts)
        if saved_fingerprint == fingerprint:
            _fill(pending, saved)
    effort: Costs = directory.read()["evaluation"].get("effort", {})
    return effort


def _fill(pending: Verdicts, saved: Verdicts) -> None:
    """Copy a saved table into a pending one. A finished adaptive evaluation saves only attacked examples."""
    rows = np.isin(pending.index, saved.index)
    pending.natural[rows] = saved.natural
    for columns, known in (
        (pending.attacks, saved.attacks),
        (pending.stages, saved.stages),
        (pending.corrupted, saved.corrupted),
    ):
        for key, column in columns.items():
            column[rows] = known[key]
    for effort, known in ((pending.forwards, saved.forwards), (pending.backwards, saved.backwards)):
        for key, column in known.items():
            effort[key] = np.zeros(len(pending), dtype=np.int64)
            effort[key][rows] = column
    for key, margins in saved.margins.items():
        pending.margins[key] = np.full(len(pending), np.nan, dtype=np.float32)
        pending.margins[key][rows] = margins
