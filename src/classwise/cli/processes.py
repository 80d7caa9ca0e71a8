"""A command in several processes on this machine, which ``torchrun`` would start on several machines."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import NoReturn

import typer

from classwise.core.errors import InputError


def leading() -> bool:
    """Whether this process speaks for all that were started with it."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int | None) -> NoReturn:
    """Exit. One of several processes does so at once.

    If it fails, what it was telling the others cannot be ended; if not, the threads that talk to them may be caught by
    the interpreter's end, and abort a process whose work is done.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def in_processes(number: int) -> None:
    """Run this very command in so many processes, each of which is told its place; then exit as they did.

    If one of them fails, the others are stopped. A process that was started so returns at once.
    """
    if "RANK" in os.environ:
        return
    if number < 1:
        raise InputError(f"{number} processes; expected 1 or more")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes say themselves what is wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "classwise", *sys.argv[1:])
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        # When one ends, the others do: those that notice by themselves, and the rest by SIGTERM.
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                raise InputError(f"process {rank + 1} of {number} was killed by signal {-failure.exitcode}") from None
        code = failed.get_first_failure()[1].exitcode
        raise typer.Exit(code if code > 0 else 128 - code) from None
    raise typer.Exit
