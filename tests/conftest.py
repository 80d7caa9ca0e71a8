"""Shared by all tests: an isolated cache, one thread, folders of optional real data, a browser, the slow tests."""

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

from classwise.core.progress import Progress

REPOSITORY = Path(__file__).resolve().parent.parent
collect_ignore_glob = ["**/conftest.py"]
"""Doctests cannot be collected from several modules of one name; pytest still reads the fixtures."""

SLOW = frozenset((REPOSITORY / "tests" / "slow.txt").read_text(encoding="utf-8").split())
"""Tests that take more than about half a second, as FILE::TEST, or all tests of a folder or a file."""

SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""Folder for the last screenshot of each browser test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests; ``make slow`` measures them."""
    for item in items:
        name = item.nodeid.partition("[")[0].rpartition("/")[2]
        if {name, item.path.name, item.path.parent.name} & SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache and one thread of our own, and let Ctrl-C reach subprocesses."""
    before = os.environ.get("CLASSWISE_CACHE")
    os.environ["CLASSWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job ignores it, and so would its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is None:
        del os.environ["CLASSWISE_CACHE"]
    else:
        os.environ["CLASSWISE_CACHE"] = before


def _real(variable: str, folder: str) -> Path:
    place = Path(os.environ.get(variable, REPOSITORY.parent / "shared" / folder))
    if not place.is_dir():
        pytest.skip(f"no real files: set {variable} or provide ../shared/{folder}")
    return place


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of real data sets; skips the test if there is none."""
    place = _real("CLASSWISE_DATA", "data")
    monkeypatch.setenv("CLASSWISE_DATA", str(place))
    return place


@pytest.fixture
def real_checkpoints() -> Path:
    """Folder of trained CIFAR-10 checkpoints; skips the test if there is none."""
    return _real("CLASSWISE_CHECKPOINTS", "checkpoints")


class _StopAfter(Progress):
    def __init__(self, amount: int) -> None:
        self.left = amount

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture
def stop_after() -> Callable[[int], Progress]:
    """Returns a progress that raises KeyboardInterrupt after a given amount of work."""
    return _StopAfter


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; skips the test if there is none."""
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
    """Open a file. The test fails on console output, a dialog, or a request for anything but local files."""
    complaints: list[str] = []
    contexts = []

    def opened(file: Path, *, width: int = 1280, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        contexts[-1].set_offline(True)
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda sent: complaints.append(sent.url) if not sent.url.startswith("file:") else None)
        page.goto(file.as_uri())
        return page

    yield opened
    for number, context in enumerate(contexts):
        if SCREENSHOTS:
            name = re.sub(r"[^a-z0-9]+", "-", f"{request.node.name}-{number}").strip("-")
            context.pages[0].screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)
        context.close()
    assert complaints == []
