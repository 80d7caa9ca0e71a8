"""What a terminal shows of long work: a bar with an estimate, and what the epochs of a training come to by class.

Accuracies are those on validation. Where several runs are trained side by side each has one line; one alone also shows
its weakest classes. Lines are never wider than the terminal.
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
"""Classes that are shown."""
REFRESHES = 2
"""A second."""
ROOMY = 72
"""Columns of a terminal that has room for counts and for the time so far."""
NAME = 16
"""Columns of a name beside its bar."""
BAR = 8
GAP = "  "


class LiveView(Bar):
    """A bar, and beneath it a note or what the last epochs came to."""

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
        """The bar and what is beneath it."""
        yield self.make_tasks_table(self.tasks)
        if self.note:
            yield Text(self.note, no_wrap=True, overflow="ellipsis")
        if self.epochs:
            yield EpochLines(list(self.epochs.values()))


@dataclass(frozen=True, slots=True)
class EpochLines:
    """What the last epochs of runs came to."""

    epochs: Sequence[Epoch]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _alone(self.epochs[0], options) if len(self.epochs) == 1 else _side_by_side(self.epochs, options)


def _alone(epoch: Epoch, options: ConsoleOptions) -> RenderResult:
    """All numbers of a run, and its weakest classes from the weakest up, column by column."""
    yield Columns([Text(part) for _, part in parts(epoch)], padding=(0, len(GAP)))
    classes = [(_shortened(name, NAME), value) for name, value in weakest(epoch)]
    width = max((cell_len(name) for name, _ in classes), default=0)
    lines = [
        f"{set_cell_size(name, width)} {horizontal_bar(value, ascii_only=options.ascii_only)} {value:5.1f}"
        for name, value in classes
    ]
    yield Columns(map(Text, lines), padding=(0, len(GAP)), column_first=True)


def _side_by_side(epochs: Sequence[Epoch], options: ConsoleOptions) -> RenderResult:
    """A line for each run, with what there is room for."""
    names = [_shortened(epoch.run.name, NAME) for epoch in epochs]
    width = max(map(cell_len, names))
    for epoch, name in zip(epochs, names, strict=True):
        spark = sparkline(_in_order(epoch), ascii_only=options.ascii_only)
        line = fitted([(9, set_cell_size(name, width)), *parts(epoch), (2, spark)], options.max_width)
        yield Text(line, no_wrap=True, overflow="ellipsis")


def parts(epoch: Epoch) -> list[tuple[int, str]]:
    """The parts of a line, each with its weight: how much would be missed."""
    record = epoch.record
    natural, robust = record["validation"]["natural"], record["validation"]["robust"]
    found = [(7, f"epoch {record['epoch']}/{epoch.epochs}"), (1, f"loss {record['loss']:.3f}")]
    if natural is not None:
        found.append((3, f"natural {natural['overall']:.1f}"))
    if robust is not None:
        name = _shortened(epoch.classes[robust["worst"]["label"]], 2 * NAME)
        found += [(5, f"robust {robust['overall']:.1f}"), (8, f"worst class {name} at {robust['worst']['value']:.1f}")]
    return found


def fitted(weighted: Sequence[tuple[int, str]], width: int) -> str:
    """Parts on one line, in their order: the weightiest, and of the others those that still fit.

    >>> fitted([(9, "seed-0"), (1, "loss 0.123"), (5, "robust 40.0")], 20)
    'seed-0  robust 40.0'
    """
    kept: list[int] = []
    for place in sorted(range(len(weighted)), key=lambda place: -weighted[place][0]):
        if not kept or cell_len(_joined(weighted, [*kept, place])) <= width:
            kept.append(place)
    return _joined(weighted, kept)


def _joined(weighted: Sequence[tuple[int, str]], places: Sequence[int]) -> str:
    return GAP.join(weighted[place][1] for place in sorted(places))


def weakest(epoch: Epoch) -> list[tuple[str, float]]:
    """The weakest classes, from the weakest up; those without validation images are left out."""
    robust = epoch.record["validation"]["robust"]
    values = [] if robust is None else robust["by_class"]
    known = sorted((value, label) for label, value in enumerate(values) if value is not None)
    return [(epoch.classes[label], value) for value, label in known[:WEAKEST]]


def _in_order(epoch: Epoch) -> list[float | None]:
    """Every class in its place where they are few, so that runs can be compared; else the weakest."""
    robust = epoch.record["validation"]["robust"]
    if robust is None or len(robust["by_class"]) > WEAKEST:
        return [value for _, value in weakest(epoch)]
    return list(robust["by_class"])


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """A sign for each share in percent, the higher the larger.

    >>> sparkline([0.0, 30.0, None, 60.0, 100.0]), sparkline([0.0, 30.0, None, 60.0, 100.0], ascii_only=True)
    ('▁▃ ▅█', '03 69')
    """
    signs = "0123456789" if ascii_only else "▁▂▃▄▅▆▇█"
    return "".join(
        " " if value is None else signs[min(int(value * len(signs) / 100), len(signs) - 1)] for value in values
    )


def horizontal_bar(value: float, *, ascii_only: bool = False) -> str:
    """A share in percent as a bar.

    >>> horizontal_bar(50.0), horizontal_bar(51.6), horizontal_bar(100.0, ascii_only=True)
    ('████    ', '████▏   ', '########')
    """
    if ascii_only:
        return ("#" * round(value * BAR / 100)).ljust(BAR)
    whole, eighths = divmod(round(value * BAR * 8 / 100), 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[eighths]).ljust(BAR)[:BAR]


def _shortened(name: str, width: int) -> str:
    text = Text(plain(name))
    text.truncate(width, overflow="ellipsis")
    return text.plain
