"""One row per example: what the model said of it untouched, after each attack, and what each attack cost.

Every number and picture is derived from this table, so anything can be recomputed, merged, compared example by
example, and resumed.
"""

# N examples

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from classwise.core.errors import InputError, one_line
from classwise.metrics.counts import Ints
from classwise.storage.files import atomic

PENDING = -1
"""A verdict not reached yet; null in the file."""
NATURAL = "natural"
WORST_CASE = "worst-case"
_GROUPS = {
    "attacks": "pred:",
    "stages": "stage:",
    "corrupted": "corrupted:",
    "forwards": "forwards:",
    "backwards": "backwards:",
}
"""Columns of one kind, and what their names begin with in the file."""
_MARGINS = "margin:"

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True, kw_only=True, eq=False)
class Verdicts:
    """Predicted labels, natural and under every attack. A naturally wrong example is broken by ``natural``."""

    index: Ints
    """(N,) position of the example in its data set."""
    label: Ints
    natural: Ints
    attacks: dict[str, Ints] = field(default_factory=dict)
    """Under each attack that searched the ball."""
    stages: dict[str, Ints] = field(default_factory=dict)
    """After each stage of an attack that has stages, ``attack/stage``; what an earlier one broke stays broken."""
    corrupted: dict[str, Ints] = field(default_factory=dict)
    """Under corruptions that know no ball, and so have no part in the worst case."""
    forwards: dict[str, Ints] = field(default_factory=dict)
    backwards: dict[str, Ints] = field(default_factory=dict)
    """Passes through the model that each example took, for each attack and stage that searched."""
    margins: dict[str, Floats] = field(default_factory=dict)
    """How far beyond the boundary each of them left the example: the largest wrong logit minus the label's; NaN where
    it did not run."""

    @classmethod
    def pending(
        cls, index: Ints, label: Ints, attacks: Iterable[str], stages: Iterable[str] = (), corrupted: Iterable[str] = ()
    ) -> Verdicts:
        """A table with nothing decided yet."""

        def undecided(keys: Iterable[str]) -> dict[str, Ints]:
            return {key: np.full(len(index), PENDING, dtype=np.int64) for key in keys}

        return cls(
            index=index,
            label=label,
            natural=undecided([NATURAL])[NATURAL],
            attacks=undecided(attacks),
            stages=undecided(stages),
            corrupted=undecided(corrupted),
        )

    def take(self, rows: np.ndarray) -> Verdicts:
        """The table of some examples."""
        groups = {group: {key: column[rows] for key, column in getattr(self, group).items()} for group in _GROUPS}
        margins = {key: column[rows] for key, column in self.margins.items()}
        whole = (self.index[rows], self.label[rows], self.natural[rows])
        return Verdicts(index=whole[0], label=whole[1], natural=whole[2], margins=margins, **groups)

    def __len__(self) -> int:
        return len(self.index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Verdicts):
            return False
        mine, theirs = self._columns() | self.margins, other._columns() | other.margins
        same = (np.array_equal(mine[name], theirs[name], equal_nan=name in self.margins) for name in mine)
        return list(mine) == list(theirs) and all(same)

    @property
    def keys(self) -> list[str]:
        """``natural``, then the attacks in the order they ran."""
        return [NATURAL, *self.attacks]

    @property
    def parts(self) -> list[str]:
        """The same, with the stages of an attack in its place where it has any."""
        stages = {key: [stage for stage in self.stages if stage.startswith(f"{key}/")] for key in self.keys}
        return [part for key in self.keys for part in stages[key] or [key]]

    @property
    def complete(self) -> bool:
        """Whether every verdict has been reached."""
        columns = [self.natural, *self.attacks.values(), *self.stages.values(), *self.corrupted.values()]
        return all(bool((column != PENDING).all()) for column in columns)

    def predictions(self, key: str) -> Ints:
        """(N,) predicted labels: natural, under an attack, after a stage, or under whichever attack broke it first."""
        if key == NATURAL:
            return self.natural
        if key != WORST_CASE:
            return self.attacks[key] if key in self.attacks else self.stages[key]
        worst = self.natural
        for predicted in self.attacks.values():
            worst = np.where(worst == self.label, predicted, worst)
        return worst

    def survived(self, key: str = WORST_CASE) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(N,) whether the label was kept."""
        return np.asarray(self.predictions(key) == self.label)

    @property
    def broken_by(self) -> list[str | None]:
        """(N,) the first of ``parts`` that broke each example, None where nothing did."""
        names = np.full(len(self), None, dtype=object)
        for part in reversed(self.parts):
            names[~self.survived(part) & (self.predictions(part) != PENDING)] = part
        return list(names)

    def _columns(self) -> dict[str, Ints]:
        """Every column under its name in the file."""
        columns = {"index": self.index, "label": self.label, NATURAL: self.natural}
        for group, prefix in _GROUPS.items():
            columns |= {f"{prefix}{key}": column for key, column in getattr(self, group).items()}
        return columns

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the table atomically, with the fingerprint of the evaluation it belongs to."""
        decided = np.logical_and.reduce([self.predictions(key) != PENDING for key in self.keys])
        columns = {name: pa.array(column, mask=column == PENDING) for name, column in self._columns().items()}
        for key, margins in self.margins.items():
            columns[f"{_MARGINS}{key}"] = pa.array(margins, mask=np.isnan(margins))
        columns["robust"] = pa.array(self.survived(), mask=~decided)
        columns["broken_by"] = pa.array(self.broken_by, type=pa.string())
        table = pa.table(columns).replace_schema_metadata({"classwise.fingerprint": fingerprint})
        with atomic(path) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def load(cls, path: Path) -> tuple[Verdicts, str]:
        """Read a table and the fingerprint it was saved with."""
        try:
            table = pq.read_table(path)
            columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
            metadata = table.schema.metadata or {}

            def ints(name: str) -> Ints:
                values = columns[name]
                if values.dtype.kind == "f":  # a column with nulls reads as float
                    values = np.where(np.isnan(values), PENDING, values)
                return np.array(values, dtype=np.int64)  # a copy: what is pending will be filled in

            def group(prefix: str) -> dict[str, Ints]:
                return {name.removeprefix(prefix): ints(name) for name in columns if name.startswith(prefix)}

            def floats(name: str) -> Floats:
                return np.array(columns[name], dtype=np.float32)

            margins = {name.removeprefix(_MARGINS): floats(name) for name in columns if name.startswith(_MARGINS)}
            verdicts = cls(
                index=ints("index"),
                label=ints("label"),
                natural=ints(NATURAL),
                **{group_name: group(prefix) for group_name, prefix in _GROUPS.items()},
                margins=margins,
            )
        except FileNotFoundError:
            raise InputError(f"no such file: {path}") from None
        except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
            reason = f"column {error} is missing" if isinstance(error, KeyError) else one_line(error, 160)
            raise InputError(f"{path} is not a table of verdicts: {reason}") from None
        return verdicts, metadata.get(b"classwise.fingerprint", b"").decode()
