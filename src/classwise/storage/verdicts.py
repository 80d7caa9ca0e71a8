"""The table of verdicts: per example, the predictions without and under each attack, and the passes of each attack.

All results derive from this table, so that they can be recomputed, merged, compared example by example, and resumed.
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
"""A pending prediction; null in the file."""
NATURAL = "natural"
WORST_CASE = "worst-case"
_GROUPS = {
    "attacks": "pred:",
    "stages": "stage:",
    "corrupted": "corrupted:",
    "forwards": "forwards:",
    "backwards": "backwards:",
}
"""Groups of columns and the prefixes of their names in the file."""
_MARGINS = "margin:"

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True, kw_only=True, eq=False)
class Verdicts:
    """Predicted labels, natural and under every attack. Naturally misclassified examples are broken by ``natural``."""

    index: Ints
    """(N,) index of the example in its data set."""
    label: Ints
    natural: Ints
    attacks: dict[str, Ints] = field(default_factory=dict)
    """Predictions under each attack within the threat model."""
    stages: dict[str, Ints] = field(default_factory=dict)
    """Predictions after each stage of an ensemble, ``attack/stage``; examples broken by earlier stages stay broken."""
    corrupted: dict[str, Ints] = field(default_factory=dict)
    """Predictions under corruptions, which are outside the threat model and not part of the worst case."""
    forwards: dict[str, Ints] = field(default_factory=dict)
    backwards: dict[str, Ints] = field(default_factory=dict)
    """Passes per example for each attack and stage."""
    margins: dict[str, Floats] = field(default_factory=dict)
    """Largest wrong logit minus the label's after each attack and stage; NaN where it did not run."""

    @classmethod
    def pending(
        cls, index: Ints, label: Ints, attacks: Iterable[str], stages: Iterable[str] = (), corrupted: Iterable[str] = ()
    ) -> Verdicts:
        """Return a table of pending predictions."""

        def pending_columns(keys: Iterable[str]) -> dict[str, Ints]:
            return {key: np.full(len(index), PENDING, dtype=np.int64) for key in keys}

        return cls(
            index=index,
            label=label,
            natural=pending_columns([NATURAL])[NATURAL],
            attacks=pending_columns(attacks),
            stages=pending_columns(stages),
            corrupted=pending_columns(corrupted),
        )

    def take(self, rows: np.ndarray) -> Verdicts:
        """Return the table of some examples."""
        groups = {group: {key: column[rows] for key, column in getattr(self, group).items()} for group in _GROUPS}
        margins = {key: column[rows] for key, column in self.margins.items()}
        index, label, natural = (column[rows] for column in (self.index, self.label, self.natural))
        return Verdicts(index=index, label=label, natural=natural, margins=margins, **groups)

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
        """``natural`` and the attacks in order of execution."""
        return [NATURAL, *self.attacks]

    @property
    def parts(self) -> list[str]:
        """The keys, with ensembles replaced by their stages."""
        stages = {key: [stage for stage in self.stages if stage.startswith(f"{key}/")] for key in self.keys}
        return [part for key in self.keys for part in stages[key] or [key]]

    @property
    def complete(self) -> bool:
        """Whether no prediction is pending."""
        columns = [self.natural, *self.attacks.values(), *self.stages.values(), *self.corrupted.values()]
        return all(bool((column != PENDING).all()) for column in columns)

    def predictions(self, key: str) -> Ints:
        """Return predicted labels (N,): natural, under an attack, after a stage, or in the worst case.

        In the worst case the prediction is that of the first attack that breaks the example.
        """
        if key == NATURAL:
            return self.natural
        if key != WORST_CASE:
            return self.attacks[key] if key in self.attacks else self.stages[key]
        worst = self.natural
        for predicted in self.attacks.values():
            worst = np.where(worst == self.label, predicted, worst)
        return worst

    def survived(self, key: str = WORST_CASE) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return whether the prediction is correct (N,)."""
        return np.asarray(self.predictions(key) == self.label)

    @property
    def broken_by(self) -> list[str | None]:
        """(N,) the first of ``parts`` that broke each example; None for examples that survived."""
        names = np.full(len(self), None, dtype=object)
        for part in reversed(self.parts):
            names[~self.survived(part) & (self.predictions(part) != PENDING)] = part
        return list(names)

    def _columns(self) -> dict[str, Ints]:
        """Return all prediction and count columns by their names in the file."""
        columns = {"index": self.index, "label": self.label, NATURAL: self.natural}
        for group, prefix in _GROUPS.items():
            columns |= {f"{prefix}{key}": column for key, column in getattr(self, group).items()}
        return columns

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the table atomically, with the fingerprint of its evaluation."""
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
        """Read a table and its fingerprint; raises InputError if it is missing or damaged."""
        if path.is_dir():
            raise InputError(f"{path} is a directory: expected a file")
        try:
            table = pq.read_table(path)
            columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
            metadata = table.schema.metadata or {}

            def ints(name: str) -> Ints:
                values = columns[name]
                if values.dtype.kind == "f":  # columns with nulls are read as float
                    values = np.where(np.isnan(values), PENDING, values)
                return np.array(values, dtype=np.int64)  # a copy, because pending rows will be filled in

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
        except PermissionError:
            raise InputError(f"{path} cannot be read: permission denied") from None
        except (pa.ArrowInvalid, OSError):
            raise InputError(f"{path} is damaged or not a parquet file; evaluate the model again") from None
        except (KeyError, TypeError, ValueError) as error:
            reason = f"column {error} is missing" if isinstance(error, KeyError) else one_line(error, 160)
            raise InputError(f"{path} is not a table of verdicts: {reason}; evaluate the model again") from None
        return verdicts, metadata.get(b"classwise.fingerprint", b"").decode()
