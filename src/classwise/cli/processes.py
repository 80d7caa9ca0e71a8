"""A command in several processes on this machine, as ``torchrun`` does on several machines."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import NoReturn

import typer

from classwise.core.errors import InputError


def is_main_process() -> bool:
    """Whether this process prints: the first of those started together, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def exit_process(code: int | None) -> NoReturn:
    """Exit; as one of several processes at once.

    After an error a pending collective operation would wait for the other processes; after success the threads of the
    process group may be caught by the end of the interpreter and abort a process whose work is done.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def run_in_processes(number: int) -> None:
    """Run this command again in ``number`` processes, each with its own rank, then exit with their exit code.

    If one of them fails, the others are stopped. Returns at once in a process that was started so.
    """
    if "RANK" in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes print their own errors
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
        # When one ends, the others end too: by themselves if they detect it, else by SIGTERM.
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                raise InputError(f"process {rank + 1} of {number} was killed by signal {-failure.exitcode}") from None
        code = failed.get_first_failure()[1].exitcode
        raise typer.Exit(code if code > 0 else 128 - code) from None
    raise typer.Exit
