"""Where answers are kept: ``KIND.json``, ``KIND.parquet`` and ``KIND.html``, side by side in any directory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from classwise.analysis.result import Answer
from classwise.reporting.pages import answers_page
from classwise.storage.files import atomic, write_json, write_text


def save(answer: Answer, out: Path, *, title: str, eyebrow: str) -> list[Path]:
    """Write what there is of an answer; the files, numbers first."""
    page = out / f"{answer.kind}.html"
    files = write(answer, out, answer.kind)
    write_text(page, answers_page(title, eyebrow, {answer.kind: answer}))
    return [*files, page]


def write(answer: Answer, out: Path, name: str) -> list[Path]:
    """Write the numbers alone."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.json"]
    write_json(files[0], answer.model_dump(mode="json", by_alias=True))
    if rows := answer.rows():
        files.append(out / f"{name}.parquet")
        with atomic(files[-1]) as partial:
            pq.write_table(pa.Table.from_pylist(rows), partial)
    return files
