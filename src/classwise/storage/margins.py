"""The margin matrix of a model: the smallest margin of each example over each wrong class under attack.

Row i holds ``m_ij = min over the ball of z_y - z_j``, the smallest margin of label y over class j that a targeted
attack found, and the natural logits. Class biases b change a margin by ``b_y - b_j`` and nothing else, so the natural
and robust accuracy of every class for any bias vector follows from this table, without the model.
"""

# N examples, K classes

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from classwise.core.errors import InputError, one_line
from classwise.metrics.counts import Ints
from classwise.storage.files import atomic

SCHEMA = "classwise/margins/1"
Matrix = NDArray[np.float32]
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Margins:
    """Natural logits and margins under attack of some examples. Pending rows are NaN."""

    index: Ints
    """(N,) index of the example in its data set."""
    label: Ints
    natural: Matrix
    """(N, K) logits without attack."""
    attacked: Matrix
    """(N, K) smallest margin found over each wrong class; infinite in the column of the label."""
    info: dict[str, Any]
    """Data, threat, search settings and fingerprint. ``targets`` is the number of wrong classes that were attacked;
    margins over the others are upper bounds, from the points that those attacks found."""

    @classmethod
    def pending(cls, index: Ints, label: Ints, num_classes: int, info: dict[str, Any]) -> Margins:
        """Return a table of pending rows."""
        empty = np.full((len(index), num_classes), np.nan, dtype=np.float32)
        return cls(index=index, label=label, natural=empty, attacked=empty.copy(), info=info)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def num_classes(self) -> int:
        """K."""
        return int(self.natural.shape[1])

    @property
    def missing(self) -> NDArray[np.bool_]:
        """(N,) whether rows are pending."""
        return np.asarray(np.isnan(self.natural[:, 0]))

    @property
    def complete(self) -> bool:
        """Whether no row is pending."""
        return not bool(self.missing.any())

    @property
    def without_attack(self) -> Matrix:
        """Return the margins (N, K) of the natural logits; infinite in the column of the label."""
        rows = np.arange(len(self))
        margins = self.natural[rows, self.label][:, None] - self.natural
        margins[rows, self.label] = np.inf
        return margins

    def take(self, rows: np.ndarray) -> Margins:
        """Return the table of some examples."""
        return Margins(
            index=self.index[rows],
            label=self.label[rows],
            natural=self.natural[rows],
            attacked=self.attacked[rows],
            info=self.info,
        )

    def save(self, path: Path) -> None:
        """Write the table atomically, in half precision."""
        columns = {
            "index": pa.array(self.index.astype(np.int32)),
            "label": pa.array(self.label.astype(np.int16)),
            "natural": _column(self.natural),
            "margin": _column(self.attacked),
        }
        table = pa.table(columns).replace_schema_metadata({"classwise.margins": json.dumps(self.info)})
        with atomic(path) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                compression_level=9,
                use_dictionary=False,
                use_byte_stream_split=True,  # groups exponents: 10% smaller
            )

    @classmethod
    def load(cls, path: Path) -> Margins:
        """Read a table; raises InputError if it is missing or damaged."""
        try:
            table = pq.read_table(path)
            info = json.loads((table.schema.metadata or {})[b"classwise.margins"])
            natural, attacked = _matrix(table, "natural"), _matrix(table, "margin")
            index, label = _integers(table, "index"), _integers(table, "label")
            if not isinstance(info, dict) or info.get("schema") != SCHEMA or natural.shape != attacked.shape:
                raise ValueError(f"expected schema {SCHEMA} and two matrices of one shape")
            if label.size and not 0 <= int(label.min()) <= int(label.max()) < natural.shape[1]:
                raise ValueError(f"labels outside 0..{natural.shape[1] - 1}")
        except FileNotFoundError:
            raise InputError(f"no such file: {path}") from None
        except KeyError as error:
            raise InputError(f"{path} is not a margin matrix: {error} is missing") from None
        except (pa.ArrowException, OSError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is not a margin matrix: {one_line(error, 160)}") from None
        return cls(index=index, label=label, natural=natural, attacked=attacked, info=info)


def _column(values: Matrix) -> pa.Array:
    """Convert a matrix to a column of fixed-size lists of float16; finite values beyond its range are clipped."""
    clipped = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)
    flat = pa.array(np.ascontiguousarray(clipped, dtype=np.float16).reshape(-1), type=pa.float16())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _integers(table: pa.Table, name: str) -> Ints:
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(f"{name} is not a column of integers")
    return np.asarray(column.to_numpy(), dtype=np.int64)


def _matrix(table: pa.Table, name: str) -> Matrix:
    column = table.column(name).combine_chunks()
    size = column.type.list_size
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flat, dtype=np.float32).reshape(len(column), size)
