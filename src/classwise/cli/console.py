"""Output of the commands: results on standard output, errors and progress on standard error, exit codes."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from classwise.cli.processes import is_main_process
from classwise.core.errors import Diverged, InputError
from classwise.core.progress import Epoch, Progress

if TYPE_CHECKING:
    from classwise.cli.live_view import LiveView
    from classwise.reporting.estimates import Estimate
    from classwise.reporting.report import Worst

WIDTH = None if sys.stdout.isatty() else 200
"""Width of tables in files and pipes, which have no terminal width."""
OUT = Console(highlight=False, width=WIDTH)
ERR = Console(stderr=True, highlight=False)
LINE_SECONDS = 10.0
NOTE_SECONDS = 2.0
"""Without a terminal, minimum seconds between progress lines; the shorter time applies to lines with a note."""

P = ParamSpec("P")
R = TypeVar("R")


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the errors that a user can fix into one line and an exit code, and restore the terminal."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except InputError as error:
            print_error(f"error: {error}")
            raise typer.Exit(2) from None
        except OSError as error:
            print_error(f"error: {error.filename or 'system error'}: {error.strerror or error}")
            raise typer.Exit(2) from None
        except Diverged as error:
            print_error(f"failed: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            if is_main_process():
                print_error(
                    "interrupted: finished work is saved; repeat the command to continue (with --resume if it has it)"
                )
            raise typer.Exit(130) from None
        finally:
            ConsoleProgress.close()

    return run


def print_error(line: str) -> None:
    """Print an error as one line on standard error, below the live view."""
    ConsoleProgress.close()
    ERR.print(Text(" ".join(line.split()), style="bold red" if ERR.is_terminal else ""), soft_wrap=True)


def note(line: str) -> None:
    """Print a remark as one line on standard error."""
    from classwise.reporting.formatting import plain

    ERR.print(Text(plain(line)), soft_wrap=True)


def say(line: str) -> None:
    """Print a line of the result on standard output."""
    OUT.print(Text(line), soft_wrap=True)


def say_json(value: Any) -> None:
    """Print the result as JSON on standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n")


def say_command(*words: object) -> None:
    """Print the command to run next."""
    import shlex

    say(f"next: {shlex.join(map(str, words))}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
    """Print a table; with ``numbers`` all columns but the first are aligned to the right."""
    from rich.table import Table

    drawn = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        drawn.add_column(column, justify="right" if numbers and position else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    OUT.print(drawn)


def number(value: float | None, digits: int = 1) -> str:
    """Format a number; a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def estimate(part: Estimate | Worst | None) -> str:
    """Format a value with its interval."""
    if part is None or part.value is None:
        return "–"
    return f"{part.value:.1f} [{number(part.low)}, {number(part.high)}]"


def check_output(path: Path | None, option: str, kind: str) -> None:
    """Refuse an output path that exists as the wrong kind, a file or a directory, before work starts."""
    if path is not None and (path.is_dir() if kind == "file" else path.is_file()):
        found = "directory" if kind == "file" else "file"
        raise InputError(f"{path} is a {found}: {option} expects a {kind}; pass another path")


class ConsoleProgress(Progress):
    """Progress as a live view on a terminal, elsewhere as occasional lines. Always on standard error."""

    shown: ClassVar[LiveView | None] = None
    """The view on the terminal, which shows one at a time."""

    def __init__(self) -> None:
        self.task, self.total, self.done = "", 0, 0
        self.began = 0.0
        self.printed: dict[Path | None, float] = {}
        """Time of the last line of each run, and of any."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        from classwise.reporting.formatting import plain

        self.task, self.total, self.done = plain(task), total, done
        self.began = time.monotonic()
        self.printed = {None: self.began}
        if ERR.is_interactive:  # only if the terminal can move its cursor
            from classwise.cli.live_view import LiveView

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
            self._print(None, note)

    def epoch(self, epoch: Epoch) -> None:
        if self.shown is not None:
            self.shown.epochs[epoch.run] = epoch
        else:
            from classwise.cli.live_view import epoch_line

            self._print(epoch.run, epoch_line(epoch))

    def _print(self, run: Path | None, note: str) -> None:
        now = time.monotonic()
        if now - self.printed.get(run, self.began) > (NOTE_SECONDS if note else LINE_SECONDS):
            self.printed |= {run: now, None: now}
            ERR.print(Text(f"{self.task}: {self.done}/{self.total}  {note}".rstrip()), soft_wrap=True)

    def finish(self) -> None:
        if self.shown is not None:
            self.close()
        elif time.monotonic() - self.began > NOTE_SECONDS:
            ERR.print(Text(f"{self.task}: done in {time.monotonic() - self.began:.0f} s"), soft_wrap=True)

    @classmethod
    def close(cls) -> None:
        """Leave the view on the screen and restore the cursor."""
        if cls.shown is not None:
            cls.shown.stop()
            cls.shown = None
