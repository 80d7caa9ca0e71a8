"""The page of an analysis in a browser: works offline, shows hostile names as text, fits a phone, in light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classwise.analysis.confusion import confusion_result, matrix_of
from classwise.analysis.result import AnalysisResult, Record
from classwise.reporting.pages import answers_page

pytest.importorskip("playwright")
from playwright.sync_api import Page

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\u202egnorw", "x" * 300, "<b>dog</b>"]


def answer(classes: list[str]) -> AnalysisResult:
    k = len(classes)
    matrix = matrix_of(5 * np.eye(k, dtype=np.int64) + np.eye(k, k=1, dtype=np.int64), classes, {})
    return confusion_result(
        Record(
            model=classes[0],
            dataset="planted",
            classes=classes,
            superclasses={},
            attack="pgd",
            natural=matrix,
            adversarial=matrix,
        )
    )


@pytest.fixture(
    params=[(HOSTILE, 1200, "light"), (HOSTILE, 375, "dark"), ([str(k) for k in range(100)], 1200, "light")]
)
def opened(visit: Callable[..., Page], request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Page, list[str]]:
    classes, width, scheme = request.param
    file = tmp_path / "answers.html"
    file.write_text(answers_page("confusion", classes[0], {"confusion": answer(classes)}), encoding="utf-8")
    page = visit(file, width=width, scheme=scheme)
    return page, classes


def test_it_is_drawn_and_names_are_text(opened: tuple[Page, list[str]]) -> None:
    page, classes = opened
    assert page.locator(".drawing .chart").count() == 2
    assert page.locator("img[src=x]").count() == 0
    assert page.locator(".drawing .chart[role=img]").first.get_attribute("aria-label")
    if len(classes) < 30:
        texts = page.locator(".drawing .chart").first.locator("text").all_text_contents()
        assert "<b>dog</b>" in texts
        assert any(text.startswith("<img src=x") for text in texts)
    else:
        assert page.locator(".drawing image").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
