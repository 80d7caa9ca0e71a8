"""A leaderboard as a static site: its page, a page per run, and the numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from classwise.core.progress import SILENT, Progress
from classwise.reporting.leaderboard import BASELINE, Leaderboard, leaderboard, robustbench
from classwise.reporting.pages import report_page, site_page
from classwise.reporting.report import load_report
from classwise.storage.files import write_json, write_text


def write_site(
    runs: Sequence[Path], out: Path, *, title: str, baseline: str = BASELINE, progress: Progress = SILENT
) -> Leaderboard:
    """Write the site to ``out``. Pages of runs are named by number, because names may contain any character."""
    reports = [load_report(run) for run in runs]
    board = leaderboard(reports, baseline=baseline)
    links = [f"runs/{number:04d}.html" for number in range(len(reports))]
    progress.start("pages", len(reports))
    for link, report in zip(links, reports, strict=True):
        (out / link).parent.mkdir(parents=True, exist_ok=True)
        write_text(out / link, report_page(report))
        progress.advance()
    progress.finish()
    write_json(out / "leaderboard.json", board.model_dump(mode="json", by_alias=True))
    write_json(out / "robustbench.json", robustbench(reports))
    write_text(out / "index.html", site_page(board, title=title, links=links))
    return board
