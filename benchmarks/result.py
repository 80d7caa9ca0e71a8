"""Results of a benchmark: ``bench.json``, the same as Markdown in ``bench.md``, and bars in ``bench.svg``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from classwise.core.errors import InputError
from classwise.storage.files import write_json, write_text
from classwise.storage.run_directory import hardware, versions

OURS = "classwise"
"""The name of this package among the contenders; ratios are relative to it."""
LOG_BEYOND = 30
"""The axis is logarithmic if the longest bar is more than this many times the shortest."""
OURS_COLOR, OTHER_COLOR = "#3d5670", "#b9c6d3"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The content of ``bench.json``, its Markdown tables, and the measurements to draw: title to name to spread."""

    content: dict[str, Any]
    tables: list[str]
    bars: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def markdown(self) -> str:
        """Return tables, notes, and the software and hardware."""
        machine = {name: value for name, value in self.content["hardware"].items() if value is not None}
        about = "; ".join(
            ", ".join(f"{name} {value}" for name, value in facts.items())
            for facts in (self.content["versions"], machine)
        )
        return "\n\n".join([*self.tables, *self.content["notes"], f"{about}; on {self.content['device']}."]) + "\n"

    def save(self, out: Path) -> None:
        """Write the three files."""
        write_text(out / "bench.svg", draw(self.bars))
        write_text(out / "bench.md", self.markdown)
        write_json(out / "bench.json", self.content)


def circumstances(
    name: str, device: torch.device, rounds: int, interrupted: bool, notes: Iterable[str]
) -> dict[str, Any]:
    """Return the common entries of a benchmark: schema, machine, versions, number of complete rounds, and notes."""
    return {
        "schema": f"classwise/bench-{name}/1",
        "device": str(device),
        "hardware": hardware(),
        "versions": versions(),
        "rounds": rounds,
        "interrupted": interrupted,
        "notes": list(dict.fromkeys(notes)),
    }


def protocol(content: Mapping[str, Any]) -> str:
    """Describe the number of rounds and the machine of a measurement in words."""
    interrupted = " (interrupted)" if content["interrupted"] else ""
    gpu = content["hardware"].get("gpu") if content["device"].startswith("cuda") else None
    place = gpu or f"CPU threads: {content['hardware'].get('threads')}"
    return f"median of {content['rounds']} interleaved rounds{interrupted} after a warm-up; {place}"


def check_place(out: Path) -> None:
    """Require a directory that is writable and contains no benchmark. Call it before measuring."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a directory")
    if (out / "bench.json").exists():
        raise InputError(f"{out} already contains a benchmark: choose another --out")
    out.mkdir(parents=True, exist_ok=True)


def draw(bars: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Draw bars of the medians with the range over the rounds, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = sum(len(group) for group in bars.values())
    figure = Figure(figsize=(8, 0.6 + 0.5 * len(bars) + 0.32 * rows), layout="constrained")
    panels = figure.subplots(
        len(bars), 1, sharex=True, squeeze=False, height_ratios=[len(group) + 0.5 for group in bars.values()]
    )[:, 0]
    medians = [one["median"] for group in bars.values() for one in group.values()]
    logarithmic = max(medians) > LOG_BEYOND * min(medians) > 0
    for panel, (title, group) in zip(panels, bars.items(), strict=True):
        for name, one in group.items():
            error = [[one["median"] - one["low"]], [one["high"] - one["median"]]]
            panel.barh(name, one["median"], xerr=error, color=OURS_COLOR if name == OURS else OTHER_COLOR, capsize=2)
            ratio = f", {times(one['ratio'])} ×" if "ratio" in one else ""
            label = f"{seconds(one['median'])} s{ratio}"
            panel.annotate(label, (1.01, name), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    if logarithmic:
        panels[-1].set_xscale("log")
    panels[-1].set_xlabel(f"seconds{', logarithmic' if logarithmic else ''}; lines: range over the rounds")
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def table(title: str, about: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table; the first column is text.

    >>> print(table("Times", "An example.", ["", "s"], [["a|b", "1.0"]]))
    ## Times
    <BLANKLINE>
    An example.
    <BLANKLINE>
    |  | s |
    |:--|--:|
    | a\\|b | 1.0 |
    """
    rule = "|" + "|".join([":--", *["--:"] * (len(columns) - 1)]) + "|"
    return "\n".join([f"## {title}", "", about, "", row(*columns), rule, *(row(*cells) for cells in rows)])


def row(*cells: str) -> str:
    """Format one line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def seconds(value: float) -> str:
    """Format seconds with three significant digits, without an exponent.

    >>> [seconds(value) for value in (0.0012345, 0.1, 1.2345, 98.76, 123.4)]
    ['0.00123', '0.100', '1.23', '98.8', '123']
    """
    digits = next((digits for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4)) if value >= limit), 5)
    return f"{value:.{digits}f}"


def interval(found: Mapping[str, Any]) -> str:
    """Format the range of a measurement."""
    return f"{seconds(found['low'])}–{seconds(found['high'])}"


def times(ratio: float) -> str:
    """Format a ratio of times."""
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def memory(value: float | None) -> str:
    """Format bytes in MiB."""
    return "–" if value is None else f"{value / 2**20:.1f} MiB"
