"""A real browser: the network off, and every complaint of a page a failure."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""A folder for what each test last saw."""


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
