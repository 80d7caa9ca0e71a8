"""A pool of worker processes that share the cores, send messages while they work, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

import torch

from classwise.core.errors import Diverged, InputError

Job = TypeVar("Job")
Result = TypeVar("Result")
Send = Callable[[Any], None]
"""Sends a small message from a job to the parent process."""
POLL_SECONDS = 0.1
"""Time between two checks for messages, and for the end of the parent process."""


def check_workers(workers: int) -> None:
    """Require at least one worker."""
    if workers < 1:
        raise InputError(f"workers = {workers}: expected at least 1")


def run_jobs(
    workers: int, work: Callable[[Job, Send], Result], jobs: Sequence[Job], receive: Send = lambda _: None
) -> list[Result]:
    """Call ``work`` on every job in ``workers`` processes; ``receive`` gets the messages that jobs send.

    If a job diverges, the others finish, and the first ``Diverged`` is raised at the end. Any other exception, and an
    interruption, ends all jobs at once.
    """
    check_workers(workers)
    context = get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (threads, os.getpid(), messages, stop)) as pool:
        try:
            with _ignoring_interrupts():
                futures = [pool.submit(_work, work, job) for job in jobs]
            for pending in _poll(futures):
                while not messages.empty():
                    receive(messages.get())
                for future in futures:
                    if future not in pending and not isinstance(future.exception(), Diverged):
                        future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop.set()
            raise
    return [future.result() for future in futures]


def _poll(futures: Sequence[Future[Any]]) -> Iterator[set[Future[Any]]]:
    """Yield the pending futures at regular intervals; finally the empty set, when all messages have been sent."""
    pending = set(futures)
    while pending:
        pending = wait(pending, POLL_SECONDS).not_done
        yield pending


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Make processes started in the block ignore Ctrl-C; the parent process ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_send: Send
"""In a worker process: sends a message to the parent."""


def _start_worker(threads: int, parent: int, messages: Any, stop: Any) -> None:
    global _send
    _send = messages.put
    torch.set_num_threads(threads)
    Thread(target=_exit_with, args=(parent, stop), daemon=True).start()


def _exit_with(parent: int, stop: Any) -> None:
    """Exit when the parent has been killed: a worker would otherwise continue."""
    while os.getppid() == parent and not stop.is_set():
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _work(work: Callable[[Job, Send], Result], job: Job) -> Result:
    return work(job, _send)
