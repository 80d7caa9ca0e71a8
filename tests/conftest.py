"""What all tests share: an isolated cache, one thread, the places of optional real data, and a browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from classwise.core.progress import Progress, Silent

REPOSITORY = Path(__file__).resolve().parent.parent
collect_ignore_glob = ["**/conftest.py"]
"""Several of one name cannot be collected for doctests; pytest reads them all the same."""

SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""A folder for what each browser test last saw."""


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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, or a skip."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the path")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens a file; it must end without a word on its console, a dialog, or a request but for files beside it."""
    complaints: list[str] = []
    contexts = []

    def opened(file: Path, *, width: int = 1280, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        contexts[-1].set_offline(True)
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto(file.as_uri())
        return page

    yield opened
    for number, context in enumerate(contexts):
        if SCREENSHOTS:
            name = re.sub(r"[^a-z0-9]+", "-", f"{request.node.name}-{number}").strip("-")
            context.pages[0].screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)
        context.close()
    assert complaints == []
