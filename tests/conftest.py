"""What all tests share: an isolated cache, one thread, and the places of optional real data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from classwise.progress import Progress, Silent

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing touches the user's own cache, tiny models do not fight for threads, Ctrl-C reaches what is started."""
    before = os.environ.get("CLASSWISE_CACHE")
    os.environ["CLASSWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background: so would be the commands it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is None:
        del os.environ["CLASSWISE_CACHE"]
    else:
        os.environ["CLASSWISE_CACHE"] = before


def _real(variable: str, folder: str) -> Path:
    place = Path(os.environ.get(variable, REPOSITORY.parent / "shared" / folder))
    if not place.is_dir():
        pytest.skip(f"no real files: {variable} is not set and there is no ../shared/{folder}")
    return place


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror of real data sets, or a skip."""
    place = _real("CLASSWISE_DATA", "data")
    monkeypatch.setenv("CLASSWISE_DATA", str(place))
    return place


@pytest.fixture
def real_checkpoints() -> Path:
    """The folder of trained CIFAR-10 checkpoints, or a skip."""
    return _real("CLASSWISE_CHECKPOINTS", "checkpoints")


class _StopAfter(Silent):
    def __init__(self, amount: int) -> None:
        self.left = amount

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture
def stop_after() -> Callable[[int], Progress]:
    """Makes a progress that interrupts, as Ctrl-C would, once more than so much is done."""
    return _StopAfter
