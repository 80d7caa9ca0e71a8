"""The page of an analysis in a real browser: drawn without a network, hostile names as text, narrow and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from classwise.analysis.confusion import Confusion, matrix_of
from classwise.reporting.pages import answers_page

pytest.importorskip("playwright")
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\u202egnorw", "x" * 300, "<b>dog</b>"]


def answer(classes: list[str]) -> Confusion:
    k = len(classes)
    matrix = matrix_of(5 * np.eye(k, dtype=np.int64) + np.eye(k, k=1, dtype=np.int64), classes, {})
    return Confusion(
        model=classes[0],
        dataset="planted",
        classes=classes,
        superclasses={},
        attack="pgd",
        natural=matrix,
        adversarial=matrix,
    )


@pytest.fixture(
    params=[(HOSTILE, 1200, "light"), (HOSTILE, 375, "dark"), ([str(k) for k in range(100)], 1200, "light")]
)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Page, list[str]]]:
    classes, width, scheme = request.param
    file = tmp_path / "answers.html"
    file.write_text(answers_page("confusion", classes[0], {"confusion": answer(classes)}), encoding="utf-8")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_offline(True)
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto(file.as_uri())
        page.wait_for_selector(".js-plotly-plot .heatmaplayer image, .js-plotly-plot .hm")
        yield page, classes
        assert complaints == []
        chromium.close()


def test_it_is_drawn_and_names_are_text(opened: tuple[Page, list[str]]) -> None:
    page, classes = opened
    assert page.locator(".js-plotly-plot").count() == 2
    assert page.locator("img[src=x]").count() == 0
    assert page.locator(".drawing[role=img]").first.get_attribute("aria-label")
    if len(classes) < 30:
        ticks = page.locator(".js-plotly-plot").first.locator(".ytick text")
        assert ticks.count() == len(classes)
        assert {"<b>dog</b>", "<img src=x onerror=alert(1)>"} <= set(ticks.all_text_contents())
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
