"""The verdicts and the effort of an evaluation, saved while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from classwise.storage.run_directory import RunDirectory, Section
from classwise.storage.verdicts import NATURAL, PENDING, Verdicts


@dataclass(slots=True, kw_only=True)
class Record:
    """Verdicts, filled in place, and the effort of each attack or stage by the name of its column."""

    verdicts: Verdicts
    effort: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Examples attacked, results rejected, seconds."""
    directory: RunDirectory | None = None
    """Where to save. None: do not save."""
    fingerprint: str = ""

    @classmethod
    def open(
        cls,
        directory: RunDirectory,
        pending: Verdicts,
        fingerprint: str,
        details: dict[str, Any],
        *,
        resume: bool,
        beside: Section | None,
    ) -> Record:
        """Claim a directory and continue from what an interrupted evaluation saved there, else from ``pending``."""
        verdicts = pending
        resumed = directory.claim("evaluation", fingerprint, details, resume=resume, beside=beside)
        if resumed and directory.verdicts.exists():
            saved, saved_fingerprint = Verdicts.load(directory.verdicts)
            verdicts = _expand(saved, pending) if saved_fingerprint == fingerprint else pending
        effort = directory.read()["evaluation"].get("effort", {})
        return cls(verdicts=verdicts, effort=effort, directory=directory, fingerprint=fingerprint)

    def save(self) -> None:
        """Save the verdicts and the effort."""
        if self.directory is not None:
            self.directory.note("evaluation", effort=self.effort)
            self.verdicts.save(self.directory.verdicts, self.fingerprint)


def _expand(saved: Verdicts, pending: Verdicts) -> Verdicts:
    """Return a saved table with a row for every example. A finished adaptive evaluation saves only attacked ones."""
    if len(saved) == len(pending):
        return saved
    rows = np.isin(pending.index, saved.index)

    def expand(columns: dict[str, Any], missing: float) -> dict[str, Any]:
        found = {key: np.full(len(pending), missing, dtype=column.dtype) for key, column in columns.items()}
        for key, column in columns.items():
            found[key][rows] = column
        return found

    return Verdicts(
        index=pending.index,
        label=pending.label,
        natural=expand({NATURAL: saved.natural}, PENDING)[NATURAL],
        attacks=expand(saved.attacks, PENDING),
        stages=expand(saved.stages, PENDING),
        corrupted=expand(saved.corrupted, PENDING),
        forwards=expand(saved.forwards, 0),
        backwards=expand(saved.backwards, 0),
        margins=expand(saved.margins, np.nan),
    )
