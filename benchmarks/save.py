"""Where a bench is kept: ``bench.json``, ``bench.md`` and ``bench.svg`` in a directory of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chart import draw
from benchmarks.result import Bench
from classwise.core.errors import InputError
from classwise.reporting.tables import markdown
from classwise.storage.files import write_json, write_text


def check_place(out: Path) -> None:
    """Refuse, before anything is measured, a place that cannot be written to or holds an earlier bench."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a directory")
    if (out / "bench.json").exists():
        raise InputError(f"{out} already holds a bench: choose another --out")
    out.mkdir(parents=True, exist_ok=True)


def save(bench: Bench, out: Path) -> None:
    """Write the three files."""
    write_text(out / "bench.svg", draw(bench.groups(), label="seconds"))
    software = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    machine = ", ".join(f"{name} {value}" for name, value in bench.hardware.items() if value is not None)
    parts = [*map(markdown, bench.tables()), *bench.notes, f"{software}; {machine}; on {bench.device}."]
    write_text(out / "bench.md", "\n\n".join(parts) + "\n")
    write_json(out / "bench.json", bench.model_dump(mode="json", by_alias=True))
