"""The result type of all analyses, and its rendering as text, tables, LaTeX, JSON, parquet and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from classwise.reporting.estimates import Interval
from classwise.reporting.figures import Figure
from classwise.reporting.pages import answers_page
from classwise.reporting.tables import Table
from classwise.storage.files import atomic, write_json, write_text

MOST_ROWS = 40
"""Maximum number of rows that a table shows; of a longer frame it shows the first ``FIRST_ROWS``."""
FIRST_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnalysisResult:
    """Finding, data frames and figures of one analysis. All files and pages derive from these."""

    name: str
    finding: str
    """One sentence with its number and, where there is a test, its p-value."""
    about: Mapping[str, Any]
    """What was analyzed: models, data set, attack, settings."""
    frames: Mapping[str, pd.DataFrame]
    """Data frames by title. The first one is written to ``NAME.parquet``, others to ``NAME-TITLE.parquet``. Columns
    ``x_low`` and ``x_high`` are the 95% interval of ``x``."""
    draw: Callable[[], list[Figure]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnalysisResult) and self.to_dict() == other.to_dict()

    @property
    def frame(self) -> pd.DataFrame:
        """The first data frame."""
        return next(iter(self.frames.values()))

    def figures(self) -> list[Figure]:
        """Draw the figures."""
        return self.draw()

    def sentences(self) -> list[str]:
        """Return the finding as the paragraphs of a page."""
        return [self.finding]

    def tables(self) -> list[Table]:
        """Return every frame as a table of text, the shortest first."""
        return [table_of(title, frame) for title, frame in sorted(self.frames.items(), key=_length) if len(frame)]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``NAME.json``: each frame as a list of rows. Missing numbers are null."""
        return {
            "schema": f"classwise/analysis-{self.name}/2",
            "finding": self.finding,
            **{key: _plain(value) for key, value in self.about.items()},
            "frames": {title: _plain(frame.to_dict("records")) for title, frame in self.frames.items()},
        }

    def to_latex(self) -> str:
        """Return the tables as LaTeX ``tabular`` environments (package booktabs)."""
        return "\n".join(
            f"% {' '.join(table.title.split())}\n"
            + pd.DataFrame(table.rows, columns=table.columns).to_latex(index=False, escape=True)
            for table in self.tables()
        )

    def write(self, out: Path, stem: str | None = None) -> list[Path]:
        """Write JSON, parquet and LaTeX files into a directory and return their paths."""
        stem = stem or self.name
        out.mkdir(parents=True, exist_ok=True)
        files = [out / f"{stem}.json", out / f"{stem}.tex"]
        write_json(files[0], self.to_dict())
        write_text(files[1], self.to_latex())
        for number, (title, frame) in enumerate(self.frames.items()):
            if len(frame):
                files.append(out / f"{stem}{'-' + title.replace(' ', '-') if number else ''}.parquet")
                with atomic(files[-1]) as partial:
                    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), partial)
        return files

    def save(self, out: Path, *, title: str, eyebrow: str) -> list[Path]:
        """Write all files and the page, whose path is the last one returned."""
        page = out / f"{self.name}.html"
        files = self.write(out)
        write_text(page, answers_page(title, eyebrow, {self.name: self}))
        return [*files, page]


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Build a frame from rows; missing numbers are NaN, and columns without any value are floats."""
    frame = pd.DataFrame(list(rows))
    return frame.astype({name: float for name in frame.columns if frame[name].isna().all()})


def interval_columns(name: str, part: Interval) -> dict[str, float | None]:
    """Return a value and the ends of its interval as the columns ``name``, ``name_low`` and ``name_high``."""
    return {name: part.value, f"{name}_low": part.low, f"{name}_high": part.high}


def table_of(title: str, frame: pd.DataFrame) -> Table:
    """Render a frame as text: intervals in brackets after their values, a dash for missing numbers.

    >>> table_of("t", pd.DataFrame({"class": ["a"], "gap_points": [1.25], "n": [4], "low": [None]})).rows
    [['a', '1.2', '4', '–']]
    """
    shown = frame if len(frame) <= MOST_ROWS else frame.head(FIRST_ROWS)
    ends = {f"{name}_{end}" for name in frame.columns for end in ("low", "high")}
    columns = [name for name in frame.columns if name not in ends]

    def cell(row: Mapping[str, Any], name: str) -> str:
        text = format_number(row[name], name)
        if (low := row.get(f"{name}_low")) is None or pd.isna(low):
            return text
        return f"{text} [{format_number(low, name)}, {format_number(row[f'{name}_high'], name)}]"

    rows = [[cell(row, name) for name in columns] for row in shown.to_dict("records")]
    about = "Brackets hold 95% intervals." if ends & set(frame.columns) else ""
    foot = "" if len(shown) == len(frame) else f"{len(shown)} of {len(frame)} rows; the parquet file has all."
    return Table(title=title, about=about, columns=[_header(name) for name in columns], rows=rows, foot=foot)


def format_number(value: Any, column: str = "") -> str:
    """Format a cell: one decimal for percent and points, else three significant digits.

    >>> format_number(None), format_number(12.345, "accuracy_percent"), format_number(0.0123456)
    ('–', '12.3', '0.0123')
    """
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    if column.endswith(("_percent", "_points", "class_variance")):
        return f"{round(value, 1) + 0.0:.1f}"
    return f"{value + 0.0:.3g}"


def p_text(p_value: float | None) -> str:
    """Return ``, p = …`` for the end of a phrase; nothing without a test.

    >>> p_text(0.0312), p_text(0.0001), p_text(None)
    (', p = 0.031', ', p < 0.001', '')
    """
    return "" if p_value is None else ", p < 0.001" if p_value < 0.001 else f", p = {p_value:.3f}"


def _length(item: tuple[str, pd.DataFrame]) -> int:
    return len(item[1])


def _header(name: str) -> str:
    """Return a column name as a heading, with the terms and units of the documentation.

    >>> _header("max_class_difference_points"), _header("widest_gap_epoch"), _header("n")
    ('MCD, points', 'widest MCD epoch', 'n')
    """
    name = re.sub(r"max_class_difference|gap(?=_(points|epoch)$)", "MCD", name)
    for unit, sign in (("_percent", ", %"), ("_points", ", points")):
        if name.endswith(unit):
            return name.removesuffix(unit).replace("_", " ") + sign
    return name.replace("_", " ")


def _plain(value: Any) -> Any:
    """Convert to what JSON can hold."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json", by_alias=True))
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
