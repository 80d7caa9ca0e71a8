"""Live view of long work on a terminal: a progress bar, and the validation accuracy of each class after every epoch.

Of several runs each has one line; a single run also shows its weakest classes. Lines are never wider than the terminal.
"""

# K classes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from classwise.core.progress import Epoch
from classwise.reporting.formatting import plain

WEAKEST = 20
"""Number of classes shown."""
REFRESHES = 2
"""Refreshes per second."""
ROOMY = 72
"""Minimum width of a terminal at which counts and the elapsed time are shown."""
NAME = 16
"""Width of a class name in characters."""
BAR = 8
"""Width of the bar of a class in characters."""
GAP = "  "


class LiveView(Bar):
    """A progress bar; below it a note or the last epoch of each run."""

    def __init__(self, console: Console) -> None:
        self.note = ""
        self.epochs: dict[Path, Epoch] = {}
        count: list[ProgressColumn] = [MofNCompleteColumn(), TimeElapsedColumn()] if console.width >= ROOMY else []
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            *count,
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=REFRESHES,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and what is below it."""
        yield self.make_tasks_table(self.tasks)
        if self.note:
            yield Text(self.note, no_wrap=True, overflow="ellipsis")
        if self.epochs:
            yield EpochLines(list(self.epochs.values()))


@dataclass(frozen=True, slots=True)
class EpochLines:
    """The last epoch of each run."""

    epochs: Sequence[Epoch]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _single_run(self.epochs[0], options) if len(self.epochs) == 1 else _several_runs(self.epochs, options)


def _single_run(epoch: Epoch, options: ConsoleOptions) -> RenderResult:
    """All numbers of a run, and its weakest classes in ascending order, column by column."""
    yield Columns([Text(part) for _, part in parts(epoch)], padding=(0, len(GAP)))
    classes = [(_truncated(name, NAME), value) for name, value in weakest(epoch)]
    width = max((cell_len(name) for name, _ in classes), default=0)
    lines = [
        f"{set_cell_size(name, width)} {horizontal_bar(value, ascii_only=options.ascii_only)} {value:5.1f}"
        for name, value in classes
    ]
    yield Columns(map(Text, lines), padding=(0, len(GAP)), column_first=True)


def _several_runs(epochs: Sequence[Epoch], options: ConsoleOptions) -> RenderResult:
    """One line per run, with the parts that fit."""
    names = [_truncated(epoch.run.name, NAME) for epoch in epochs]
    width = max(map(cell_len, names))
    for epoch, name in zip(epochs, names, strict=True):
        spark = sparkline(_for_sparkline(epoch), ascii_only=options.ascii_only)
        line = fitted([(9, set_cell_size(name, width)), *parts(epoch), (2, spark)], options.max_width)
        yield Text(line, no_wrap=True, overflow="ellipsis")


def parts(epoch: Epoch) -> list[tuple[int, str]]:
    """Return the parts of a line, each with its weight; the lightest are left out first."""
    record = epoch.record
    natural, robust = record["validation"]["natural"], record["validation"]["robust"]
    line = [(7, f"epoch {record['epoch']}/{epoch.epochs}"), (1, f"loss {record['loss']:.3f}")]
    if natural is not None:
        line.append((3, f"natural {natural['overall']:.1f}"))
    if robust is not None:
        name = _truncated(epoch.classes[robust["worst"]["label"]], 2 * NAME)
        line += [(5, f"robust {robust['overall']:.1f}"), (8, f"worst class {name} at {robust['worst']['value']:.1f}")]
    return line


def epoch_line(epoch: Epoch) -> str:
    """Return an epoch as one line, for output that is not a terminal."""
    return GAP.join([plain(epoch.run.name), *(text for _, text in parts(epoch))])


def fitted(weighted: Sequence[tuple[int, str]], width: int) -> str:
    """Join parts in their order: the heaviest, then the others by weight as far as they fit.

    >>> fitted([(9, "seed-0"), (1, "loss 0.123"), (5, "robust 40.0")], 20)
    'seed-0  robust 40.0'
    """
    kept: list[int] = []
    for i in sorted(range(len(weighted)), key=lambda i: -weighted[i][0]):
        if not kept or cell_len(_joined(weighted, [*kept, i])) <= width:
            kept.append(i)
    return _joined(weighted, kept)


def _joined(weighted: Sequence[tuple[int, str]], indices: Sequence[int]) -> str:
    return GAP.join(weighted[i][1] for i in sorted(indices))


def weakest(epoch: Epoch) -> list[tuple[str, float]]:
    """Return the weakest classes in ascending order, without those that have no validation images."""
    robust = epoch.record["validation"]["robust"]
    values = [] if robust is None else robust["by_class"]
    known = sorted((value, label) for label, value in enumerate(values) if value is not None)
    return [(epoch.classes[label], value) for value, label in known[:WEAKEST]]


def _for_sparkline(epoch: Epoch) -> list[float | None]:
    """Return all classes in label order if they are few, so that runs can be compared; else the weakest."""
    robust = epoch.record["validation"]["robust"]
    if robust is None or len(robust["by_class"]) > WEAKEST:
        return [value for _, value in weakest(epoch)]
    return list(robust["by_class"])


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """Draw each percentage as one character.

    >>> sparkline([0.0, 30.0, None, 60.0, 100.0]), sparkline([0.0, 30.0, None, 60.0, 100.0], ascii_only=True)
    ('▁▃ ▅█', '03 69')
    """
    characters = "0123456789" if ascii_only else "▁▂▃▄▅▆▇█"
    return "".join(
        " " if value is None else characters[min(int(value * len(characters) / 100), len(characters) - 1)]
        for value in values
    )


def horizontal_bar(value: float, *, ascii_only: bool = False) -> str:
    """Draw a percentage as a bar.

    >>> horizontal_bar(50.0), horizontal_bar(51.6), horizontal_bar(100.0, ascii_only=True)
    ('████    ', '████▏   ', '########')
    """
    if ascii_only:
        return ("#" * round(value * BAR / 100)).ljust(BAR)
    whole, eighths = divmod(round(value * BAR * 8 / 100), 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[eighths]).ljust(BAR)[:BAR]


def _truncated(name: str, width: int) -> str:
    text = Text(plain(name))
    text.truncate(width, overflow="ellipsis")
    return text.plain
