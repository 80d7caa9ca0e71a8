"""The page of an analysis in a browser: works offline, shows hostile names as text, fits a phone, in light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classwise.analysis.homing import homing_matrix
from classwise.analysis.result import AnalysisResult
from classwise.reporting.pages import answers_page
from classwise.storage.verdicts import Verdicts

pytest.importorskip("playwright")
from playwright.sync_api import Page

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\u202egnorw", "x" * 300, "<b>dog</b>"]


def answer(classes: list[str]) -> AnalysisResult:
    label = np.repeat(np.arange(len(classes)), 6)
    verdicts = Verdicts.pending(np.arange(len(label)), label, ["pgd"])
    verdicts.natural = label
    # One image of each class is misclassified as the next class.
    verdicts.attacks["pgd"] = np.where(np.arange(len(label)) % 6, label, (label + 1) % len(classes))
    return homing_matrix(classes[0], "pgd", classes, verdicts, {0: verdicts})


@pytest.fixture(
    params=[(HOSTILE, 1200, "light"), (HOSTILE, 375, "dark"), ([str(k) for k in range(100)], 1200, "light")]
)
def opened(visit: Callable[..., Page], request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Page, list[str]]:
    classes, width, scheme = request.param
    file = tmp_path / "answers.html"
    file.write_text(answers_page("homing", classes[0], {"homing": answer(classes)}), encoding="utf-8")
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
