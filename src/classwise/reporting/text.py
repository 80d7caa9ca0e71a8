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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from classwise.core.errors import InputError, unknown
from classwise.reporting import formatting
from classwise.reporting.formatting import ABSENT, plain
from classwise.reporting.results import ComparisonData, ReportData, Result
from classwise.reporting.tables import Cell, Table
from classwise.storage.files import atomic, write_text

Subject = ReportData | ComparisonData

SCHEMA = pa.schema(
    {name: pa.string() for name in ("model", "result", "class")}
    | {"label": pa.int64()}
    | {name: pa.float64() for name in ("value", "low", "high")}
    | {"n": pa.int64()}
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
        dict(zip(SCHEMA.names, (model, name, class_, label, part.value, part.low, part.high, part.n), strict=True))
        for name in _keys(subject, key)
        for model, result in _measured(subject, name)
        for class_, label, part in [*((p.name, p.label, p) for p in result.by_class), (None, None, result.overall)]
    ]


def _measured(subject: Subject, key: str) -> list[tuple[str, Result]]:
    if isinstance(subject, ReportData):
        return [(subject.name, subject[key])]
    return [(row.model, row) for row in subject[key]]


def _table(subject: Subject, keys: list[str]) -> Table:
    return _report_table(subject, keys) if isinstance(subject, ReportData) else _comparison_table(subject, keys)


def _report_table(report: ReportData, keys: list[str]) -> Table:
    """Return a row per class, the worst of each result in bold, and summary rows."""
    results, classes = [report[key] for key in keys], report.dataset.classes
    worst = [result.worst.label if result.worst else None for result in results]
    rows = [
        [name, *(_cell(one.shares[label], label == low) for one, low in zip(results, worst, strict=True))]
        for label, name in enumerate(classes)
    ]
    rows += [
        ["average", *(number(result.overall.value) for result in results)],
        ["worst", *(number(result.worst.value if result.worst else None) for result in results)],
        ["CV", *(number(result.cv) for result in results)],
        ["MCD", *(number(result.mcd) for result in results)],
    ]
    title = f"Accuracy of {report.name} on {_measured_on(report, results)}"
    return Table(title=title, columns=[_left("class"), *keys], rows=rows, parts=(0, len(classes)))


def _comparison_table(comparison: ComparisonData, keys: list[str]) -> Table:
    """Return a row per model and result; the highest worst class of each result in bold."""
    rows: list[list[str]] = []
    for key in keys:
        highest = max((row.worst.value for row in comparison[key] if row.worst), default=-1.0)
        for place, row in enumerate(comparison[key]):
            worst = row.worst.value if row.worst else None
            cells = [number(row.overall.value), row.worst.name if row.worst else ABSENT, _cell(worst, worst == highest)]
            rows.append(
                [key if place == 0 else "", row.model, *cells, number(row.cv), number(row.mcd), number(row.rho, 3)]
            )
    measured = _measured_on(comparison, [row for key in keys for row in comparison[key]])
    return Table(
        title=f"Accuracy on {measured}; rho is against {comparison.models[0]}",
        columns=[_left("result"), _left("model"), "average", _left("worst class"), "worst", "CV", "MCD", "rho"],
        rows=rows,
        parts=range(0, len(rows), len(comparison.models)),
    )


def _left(text: str) -> Cell:
    return Cell(text, css="left")


def _cell(value: float | None, bold: bool) -> Cell:
    return Cell(number(value), css="bold" if bold else "")


def _measured_on(subject: Subject, results: Sequence[Result]) -> str:
    """Return the data, the threat, and the largest distance of a value from the ends of its interval."""
    reach = [
        max(part.value - part.low, part.high - part.value)
        for result in results
        for part in (result.overall, *result.by_class)
        if part.value is not None and part.low is not None and part.high is not None
    ]
    data, threat = subject.dataset, subject.threat
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


# Formats.


def _texts(table: Table, escaped: Callable[[str], str], bold: str) -> list[list[str]]:
    """Return the columns and rows as text."""
    return [
        [bold.format(escaped(cell)) if isinstance(cell, Cell) and cell.css == "bold" else escaped(cell) for cell in row]
        for row in (table.columns, *table.rows)
    ]


def _align(table: Table) -> str:
    return "".join("l" if isinstance(column, Cell) and column.css == "left" else "r" for column in table.columns)


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a Markdown table; cells whose css is ``bold`` are in bold."""
    head, *rows = (f"| {' | '.join(row)} |" for row in _texts(table, markdown_escaped, "**{}**"))
    rule = "|".join(":--" if side == "l" else "--:" for side in _align(table))
    return [head, f"|{rule}|", *rows]


def _markdown(subject: Subject, keys: list[str]) -> str:
    table = _table(subject, keys)
    return "\n".join([markdown_escaped(table.title), "", *markdown_table(table), ""])


def _latex(subject: Subject, keys: list[str]) -> str:
    table = _table(subject, keys)
    head, *rows = (rf"{' & '.join(row)} \\" for row in _texts(table, _latex_escaped, r"\textbf{{{}}}"))
    lines = [
        f"% {plain(table.title)}",
        r"% \usepackage{booktabs}; scripts other than Latin need XeLaTeX or LuaLaTeX and a font that has them.",
        rf"\begin{{tabular}}{{{_align(table)}}}",
        r"\toprule",
        head,
    ]
    for place, row in enumerate(rows):
        lines += [r"\midrule", row] if place in table.parts else [row]
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
