"""Reports and comparisons as Markdown, LaTeX, CSV and parquet.

Markdown and LaTeX are rounded tables: a report has a row per class, a comparison a row per model and result. CSV and
parquet hold every accuracy with its interval in long format at full precision; the row without a label is the average.

In text, names are one line without control and direction characters; parquet keeps them unchanged. A CSV text that a
spreadsheet could read as a formula, or that starts with an apostrophe, gets a leading apostrophe.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from classwise.core.errors import InputError, unknown
from classwise.reporting import formatting
from classwise.reporting.estimates import Estimate
from classwise.reporting.formatting import plain
from classwise.reporting.results import ComparisonData, DatasetInfo, ReportData, Result, Row, ThreatInfo
from classwise.reporting.tables import Cell, Grid, markdown_lines
from classwise.storage.files import atomic, write_text

Subject = ReportData | ComparisonData

SCHEMA = pa.schema(
    {
        "model": pa.string(),
        "result": pa.string(),
        "class": pa.string(),
        "label": pa.int64(),
        "value": pa.float64(),
        "low": pa.float64(),
        "high": pa.float64(),
        "n": pa.int64(),
    }
)
"""The columns of CSV and parquet."""


def render(subject: Subject, format: str, key: str | None = None) -> str:
    """Return a report or a comparison as text; ``key`` selects one result."""
    if format == "parquet":
        raise InputError("parquet is not a text format: give a file to write")
    if format not in _TEXTS:
        raise unknown("format", format, FORMATS)
    return _TEXTS[format](subject, _keys(subject, key))


def save(subject: Subject, format: str, path: Path) -> None:
    """Write a report or a comparison in one of the formats."""
    if format != "parquet":
        write_text(path, render(subject, format))
        return
    with atomic(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows(subject), SCHEMA), partial)


def rows(subject: Subject, key: str | None = None) -> list[dict[str, Any]]:
    """Return every accuracy in long format: by class, then the average, which has no label."""
    return [
        {"model": model, "result": name, "class": class_, "label": label}
        | {"value": part.value, "low": part.low, "high": part.high, "n": part.n}
        for model, name, result in _measured(subject, _keys(subject, key))
        for class_, label, part in _parts(result)
    ]


# Content of the tables.


def _grid(subject: Subject, keys: list[str]) -> Grid:
    return _report_grid(subject, keys) if isinstance(subject, ReportData) else _comparison_grid(subject, keys)


def _report_grid(report: ReportData, keys: list[str]) -> Grid:
    """Return a row per class, the worst of each result in bold, and summary rows."""
    results = [report[key] for key in keys]
    summary = {
        "average": [result.overall.value for result in results],
        "worst": [result.worst.value if result.worst else None for result in results],
        "CV": [result.cv for result in results],
        "MCD": [result.mcd for result in results],
    }
    parts = [part for result in results for part in [result.overall, *result.by_class]]
    classes = report.dataset.classes
    return Grid(
        f"Accuracy of {_model(report)} on {_measured_on(report.dataset, report.threat, parts)}",
        [Cell("class", css="left"), *map(Cell, keys)],
        [
            *(
                [
                    Cell(name),
                    *(
                        _cell(result.by_class[label].value, result.worst is not None and label == result.worst.label)
                        for result in results
                    ),
                ]
                for label, name in enumerate(classes)
            ),
            *([Cell(name), *map(_cell, values)] for name, values in summary.items()),
        ],
        parts=(0, len(classes)),
    )


def _comparison_grid(comparison: ComparisonData, keys: list[str]) -> Grid:
    """Return a row per model and result; the highest worst class of each result in bold."""
    rows: list[list[Cell]] = []
    starts = []
    for key in keys:
        highest = max((row.worst.value for row in comparison[key] if row.worst), default=None)
        starts.append(len(rows))
        rows += [
            [
                Cell(key if place == 0 else ""),
                Cell(row.model),
                _cell(row.overall.value),
                Cell(row.worst.name if row.worst else number(None)),
                _cell(row.worst.value, row.worst.value == highest) if row.worst else _cell(None),
                _cell(row.cv),
                _cell(row.mcd),
                Cell(number(row.rho, 3)),
            ]
            for place, row in enumerate(comparison[key])
        ]
    parts = [part for key in keys for row in comparison[key] for part in [row.overall, *row.by_class]]
    baseline = f"rho is against {comparison.models[0]}"
    names = ("result", "model", "average", "worst class", "worst", "CV", "MCD", "rho")
    return Grid(
        f"Accuracy on {_measured_on(comparison.dataset, comparison.threat, parts)}; {baseline}",
        [Cell(name, css="left" if name in ("result", "model", "worst class") else "") for name in names],
        rows,
        parts=starts,
    )


def _cell(value: float | None, bold: bool = False) -> Cell:
    return Cell(number(value), css="bold" if bold else "")


def _measured_on(data: DatasetInfo, threat: ThreatInfo, parts: list[Estimate]) -> str:
    """Return the data, the threat, and the largest distance of a value from the ends of its interval."""
    reach = [
        max(part.value - part.low, part.high - part.value)
        for part in parts
        if part.value is not None and part.low is not None and part.high is not None
    ]
    within = f"; 95% intervals within {number(max(reach))} points" if reach else ""
    return f"{data.name}/{data.split} in percent, {data.n} images, {threat.norm} eps = {threat.eps_text}{within}"


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a table, without a thousands separator.

    >>> number(1234.56), number(-0.4), number(None)
    ('1234.6', '−0.4', '–')
    """
    return formatting.number(value, digits).replace(",", "")


def _keys(subject: Subject, key: str | None) -> list[str]:
    if key is None:
        return list(subject.results)
    subject[key]  # raises for an unknown key
    return [key]


def _model(report: ReportData) -> str:
    return str(report.model.get("name", "model"))


def _measured(subject: Subject, keys: list[str]) -> Iterator[tuple[str, str, Result | Row]]:
    for key in keys:
        if isinstance(subject, ReportData):
            yield _model(subject), key, subject[key]
        else:
            yield from ((row.model, key, row) for row in subject[key])


def _parts(result: Result | Row) -> Iterator[tuple[str | None, int | None, Estimate]]:
    yield from ((part.name, part.label, part) for part in result.by_class)
    yield None, None, result.overall


# Formats.


def _texts(row: Sequence[Cell], escaped: Callable[[str], str], bold: str) -> list[str]:
    return [bold.format(escaped(cell.text)) if cell.css == "bold" else escaped(cell.text) for cell in row]


def _align(grid: Grid) -> str:
    return "".join("l" if column.css == "left" else "r" for column in grid.columns)


def _markdown(subject: Subject, keys: list[str]) -> str:
    grid = _grid(subject, keys)
    rows = [_texts(row, markdown_escaped, "**{}**") for row in (grid.columns, *grid.rows)]
    return "\n".join([markdown_escaped(grid.title), "", *markdown_lines(rows, _align(grid)), ""])


def _latex(subject: Subject, keys: list[str]) -> str:
    grid = _grid(subject, keys)
    cells = [_texts(row, _latex_escaped, r"\textbf{{{}}}") for row in (grid.columns, *grid.rows)]
    head, *rows = (rf"{' & '.join(row)} \\" for row in cells)
    lines = [
        f"% {plain(grid.title)}",
        r"% \usepackage{booktabs}; scripts other than Latin need XeLaTeX or LuaLaTeX and a font that has them.",
        rf"\begin{{tabular}}{{{_align(grid)}}}",
        r"\toprule",
        head,
    ]
    for place, row in enumerate(rows):
        lines += [r"\midrule", row] if place in grid.parts else [row]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _csv(subject: Subject, keys: list[str]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(SCHEMA.names)
    for key in keys:
        writer.writerows([_spreadsheet_safe(value) for value in row.values()] for row in rows(subject, key))
    return written.getvalue()


_TEXTS: dict[str, Callable[[Subject, list[str]], str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}
FORMATS = (*_TEXTS, "parquet")

_MARKDOWN_SIGNS = re.compile(r"[\\`*_\[\]<>&|~$:@]|(?i:(?<=www)\.)")
"""Including the characters that turn addresses into links."""


def markdown_escaped(text: str) -> str:
    return _MARKDOWN_SIGNS.sub(r"\\\g<0>", plain(text))


_LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "`": r"\textasciigrave{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "−": "$-$",
    '"': r"\symbol{34}",  # some languages of babel make it a command
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "[]*'"},  # after \\ the first three would be its arguments; '' is one sign
}


def _latex_escaped(text: str) -> str:
    written = "".join(_LATEX_SIGNS.get(sign, sign) for sign in plain(text))
    return re.sub(r"-(?=-)", "-{}", written)  # -- would be a dash


def _spreadsheet_safe(value: Any) -> Any:
    """Return a text that a spreadsheet does not read as a formula; numbers unchanged.

    >>> _spreadsheet_safe("=1+1"), _spreadsheet_safe("cat"), _spreadsheet_safe(-1.5)
    ("'=1+1", 'cat', -1.5)
    """
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text[:1] in tuple("'=+-@＝＋－＠") else text
