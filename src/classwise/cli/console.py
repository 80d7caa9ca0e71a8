"""Terminal manners: errors in one line, progress as a live view on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from classwise.cli.launch import leading
from classwise.cli.live import GAP, LiveView, parts
from classwise.core.errors import Diverged, InputError
from classwise.core.progress import Epoch, Progress
from classwise.reporting.estimates import Estimate
from classwise.reporting.formatting import plain
from classwise.reporting.report import Worst

WIDTH = None if sys.stdout.isatty() else 200
"""A file or a pipe has no width that a table should be cut to."""
OUT = Console(highlight=False, width=WIDTH)
ERR = Console(stderr=True, highlight=False)
LINE_SECONDS = 10.0
NOTE_SECONDS = 2.0
"""Where there is no terminal, a line of progress at most this often; sooner where there is something to say."""

P = ParamSpec("P")
R = TypeVar("R")


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what users can mend into one line and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _terminal_restored():
                return command(*args, **kwargs)
        except InputError as error:
            complain(f"error: {error}")
            raise typer.Exit(2) from None
        except OSError as error:
            complain(f"error: {error.filename or 'the system'}: {error.strerror or error}")
            raise typer.Exit(2) from None
        except Diverged as error:
            complain(f"failed: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            if leading():
                complain(
                    "interrupted: what was finished is kept; the same command continues it "
                    "(train, evaluate: with --resume)"
                )
            raise typer.Exit(130) from None

    return run


def complain(line: str) -> None:
    """What is wrong, in one line on standard error."""
    ERR.print(Text(" ".join(line.split()), style="bold red" if ERR.is_terminal else ""), soft_wrap=True)


def note(line: str) -> None:
    """A remark on the way, in one line on standard error."""
    ERR.print(Text(plain(line)), soft_wrap=True)


def say(line: str) -> None:
    """A line of result on standard output."""
    OUT.print(Text(line), soft_wrap=True)


def say_json(value: Any) -> None:
    """A machine's answer on standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n")


def table(title: str, columns: list[str], rows: list[list[str]], *, numbers: bool = True) -> None:
    """A table on standard output; all columns but the first are numbers, unless said otherwise."""
    drawn = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        drawn.add_column(column, justify="right" if numbers and position else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    OUT.print(drawn)


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def estimate(part: Estimate | Worst | None) -> str:
    """A value with its interval."""
    if part is None or part.value is None:
        return "–"
    return f"{part.value:.1f} [{number(part.low)}, {number(part.high)}]"


class ConsoleProgress(Progress):
    """A live view on a terminal; elsewhere a plain line now and then. Always on standard error."""

    shown: ClassVar[LiveView | None] = None
    """The view on the terminal; there is room for one."""

    def __init__(self) -> None:
        self.task, self.total, self.done = "", 0, 0
        self.began = 0.0
        self.spoke: dict[Path | None, float] = {}
        """When a line was last printed, of each run and of the task."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.task, self.total, self.done = plain(task), total, done
        self.began = time.monotonic()
        self.spoke = {None: self.began}
        if ERR.is_interactive:  # a terminal that can move its cursor
            self.close()
            ConsoleProgress.shown = LiveView(ERR)
            ConsoleProgress.shown.add_task(self.task, total=total, completed=done)
            ConsoleProgress.shown.start()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        if self.shown is not None:
            self.shown.advance(self.shown.task_ids[0], amount)
            self.shown.note = note or self.shown.note
        else:
            self._say(None, note)

    def epoch(self, epoch: Epoch) -> None:
        if self.shown is not None:
            self.shown.epochs[epoch.run] = epoch
        else:
            self._say(epoch.run, GAP.join([plain(epoch.run.name), *(part for _, part in parts(epoch))]))

    def _say(self, whose: Path | None, note: str) -> None:
        now = time.monotonic()
        if now - self.spoke.get(whose, self.began) > (NOTE_SECONDS if note else LINE_SECONDS):
            self.spoke |= {whose: now, None: now}
            ERR.print(Text(f"{self.task}: {self.done}/{self.total}  {note}".rstrip()), soft_wrap=True)

    def finish(self) -> None:
        if self.shown is not None:
            self.close()
        elif time.monotonic() - self.began > NOTE_SECONDS:
            ERR.print(Text(f"{self.task}: done in {time.monotonic() - self.began:.0f} s"), soft_wrap=True)

    @classmethod
    def close(cls) -> None:
        """Leave the view as it is and give the terminal back."""
        if cls.shown is not None:
            cls.shown.stop()
            cls.shown = None


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """However a command ends, the cursor is seen again and what is printed then stands beneath the view."""
    try:
        yield
    finally:
        ConsoleProgress.close()
