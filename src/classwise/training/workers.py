"""Jobs in processes of their own, several at a time: they share the cores, and end with whoever asked for them."""

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
Tell = Callable[[Any], None]
"""Takes what a job has to say: something small."""
PAUSE = 0.1
"""Seconds between two looks at what the others say."""


def check_workers(workers: int) -> None:
    """They must be some."""
    if workers < 1:
        raise InputError(f"workers = {workers}: expected at least 1")


def done_by(
    workers: int, work: Callable[[Job, Tell], Result], jobs: Sequence[Job], heard: Tell = lambda _: None
) -> list[Result]:
    """What ``work`` makes of every job, by so many processes; ``heard`` gets what it tells meanwhile.

    A job that diverges keeps no other from its end, after which the first such is told. Whatever else goes wrong, or an
    interruption, ends all at once.
    """
    check_workers(workers)
    context = get_context("spawn")
    told, end = context.SimpleQueue(), context.Event()
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, _begin, (threads, os.getpid(), told, end)) as pool:
        try:
            with _deaf():
                futures = [pool.submit(_work, work, job) for job in jobs]
            for pending in _until_done(futures):
                while not told.empty():
                    heard(told.get())
                for future in futures:
                    if future not in pending and not isinstance(future.exception(), Diverged):
                        future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end.set()
            raise
    return [future.result() for future in futures]


def _until_done(futures: Sequence[Future[Any]]) -> Iterator[set[Future[Any]]]:
    """Those that are not done, now and again; none the last time, when everything has been told."""
    pending = set(futures)
    while pending:
        pending = wait(pending, PAUSE).not_done
        yield pending


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started in here do not hear an interruption: whoever started them ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_tell: Tell
"""In a worker: to whoever asked."""


def _begin(threads: int, parent: int, told: Any, end: Any) -> None:
    global _tell
    _tell = told.put
    torch.set_num_threads(threads)
    Thread(target=_end_with, args=(parent, end), daemon=True).start()


def _end_with(parent: int, end: Any) -> None:
    """A worker whose parent was killed would go on with what it has."""
    while os.getppid() == parent and not end.is_set():
        time.sleep(PAUSE)
    os._exit(1)


def _work(work: Callable[[Job, Tell], Result], job: Job) -> Result:
    return work(job, _tell)
