"""The report of one model: what ``report.json`` holds, with its tables and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

from classwise.core.errors import InputError
from classwise.reporting import text
from classwise.reporting.examples import BrokenExamples
from classwise.reporting.report_page import report_fragment, report_page
from classwise.reporting.results import Corrected, DatasetInfo, ReportData, Result, ThreatInfo, Worst
from classwise.storage.files import write_json, write_text
from classwise.storage.verdicts import Verdicts

__all__ = ["ClassReport", "Corrected", "DatasetInfo", "Result", "ThreatInfo", "Worst", "load_report"]


class ClassReport(ReportData):
    """The robustness of one model, class by class."""

    @overload
    def table(self) -> list[dict[str, Any]]: ...

    @overload
    def table(self, *, format: str) -> str: ...

    def table(self, *, format: str | None = None) -> list[dict[str, Any]] | str:
        """Return every accuracy as rows for pandas; with a format as text: markdown, latex or csv."""
        return text.rows(self) if format is None else text.render(self, format)

    def to_json(self, path: str | Path) -> None:
        """Write ``report.json``."""
        write_json(Path(path), self.model_dump(mode="json", by_alias=True))

    def to_html(self, path: str | Path) -> None:
        """Write the page, one file without external resources."""
        write_text(Path(path), report_page(self))

    def _repr_html_(self) -> str:
        return report_fragment(self)


def load_report(path: str | Path) -> ClassReport:
    """Read the report of a run directory (or a ``report.json``), with verdicts and examples if they are beside it."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"no such run directory: {path}")
    file = path / "report.json" if path.is_dir() else path
    if not file.exists():
        raise InputError(f"{path} contains no report.json: evaluate the model first")
    report = ClassReport.read(file, "a classwise report")
    table = file.parent / "verdicts.parquet"
    if table.exists():
        verdicts, n = Verdicts.load(table)[0], report.dataset.n
        if len(verdicts) != n:
            raise InputError(
                f"{table} has {len(verdicts)} rows but {file.name} has {n} examples: evaluate the model again"
            )
        report._verdicts = verdicts
    shown = file.parent / "examples.json"
    if shown.exists():
        report.keep_examples(BrokenExamples.read(shown, "a gallery"))
    return report
