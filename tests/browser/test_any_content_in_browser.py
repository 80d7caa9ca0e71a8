"""Pages with two to a thousand classes and with hostile names in a browser: usable, and names stay text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classwise.reporting.comparison import compare
from classwise.reporting.pages import comparison_page, report_page
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Finding, Sanity
from classwise.reporting.site import write_site
from classwise.storage.verdicts import Verdicts

pytest.importorskip("playwright")
from playwright.sync_api import Page

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\u202egnorw",
    "x" * 300,
    "\"double\" & 'single' `quotes`",
    "${alert(4)} {{ 7 * 7 }}",
]
LARGEST_PAGE = 1_000_000
CLASSES = {str(k): [f"class {number}" for number in range(k)] for k in (2, 10, 100, 1000)} | {"hostile": HOSTILE}


def make_report(name: str, classes: list[str], seed: int) -> ClassReport:
    rng, k = np.random.default_rng(seed), len(classes)
    label = np.repeat(np.arange(k), 10)
    rates = rng.uniform(0.2, 0.9, k)[label]
    other = (label + rng.integers(1, k, len(label))) % k
    natural = np.where(rng.random(len(label)) < rates, label, other)
    attacked = np.where(rng.random(len(label)) < 0.6, natural, other)
    return ClassReport.from_verdicts(
        Verdicts(index=np.arange(len(label)), label=label, natural=natural, attacks={classes[0]: attacked}),
        dataset=DatasetInfo(name=classes[1], split="test", n=len(label), classes=classes),
        model={"name": name, "weights": classes[-1], "description": classes[1]},
        threat=ThreatInfo(norm="Linf", eps=8 / 255, eps_text="8/255"),
        attacks={},
        sanity=Sanity(findings=[Finding(severity="warning", code="planted", text=f"Seen at {classes[1]}.")]),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """The three kinds of page for each list of classes."""
    found = {}
    for name, classes in CLASSES.items():
        folder = tmp_path_factory.mktemp(name)
        reports = [make_report(classes[seed], classes, seed) for seed in range(2)]
        for number, report in enumerate(reports):
            (folder / str(number)).mkdir()
            report.to_json(folder / str(number) / "report.json")
        (folder / "report.html").write_text(report_page(reports[0]), encoding="utf-8")
        (folder / "comparison.html").write_text(comparison_page(compare(*reports)), encoding="utf-8")
        write_site([folder / "0", folder / "1"], folder / "site", title=classes[1])
        found[name] = {
            "report": folder / "report.html",
            "comparison": folder / "comparison.html",
            "site": folder / "site" / "index.html",
        }
    return found


@pytest.fixture(params=[1280, 375])
def opened(visit: Callable[..., Page], request: pytest.FixtureRequest, files: dict[str, dict[str, Path]]) -> Page:
    name, kind = request.getfixturevalue("name"), request.getfixturevalue("kind")
    return visit(files[name][kind], width=request.param)


@pytest.mark.parametrize("kind", ["report", "comparison", "site"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_page_stays_usable(opened: Page, files: dict[str, dict[str, Path]], name: str, kind: str) -> None:
    assert files[name][kind].stat().st_size < LARGEST_PAGE
    width = opened.viewport_size["width"] if opened.viewport_size else 0
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.locator("h1").is_visible()
    # A page is too long if it takes more screens than this; those of a phone are narrower.
    screens = opened.evaluate("document.documentElement.scrollHeight") / 800
    assert screens < (8 if width > 1000 else 14)
    for control in opened.locator("fieldset label:visible").all():
        control.click()


@pytest.mark.parametrize("kind", ["report", "comparison", "site"])
@pytest.mark.parametrize("name", ["hostile"])
def test_names_are_text(opened: Page, kind: str, name: str) -> None:
    scripts, images = opened.locator("script").count(), opened.locator("img[src=x], img[onerror]").count()
    assert (scripts, images) == (1, 0)
    text = opened.locator("body").inner_text()
    assert "alert(2)" in text
    assert "\u202e" not in text  # no text after a name is reversed
    assert "49" not in opened.locator("h1").inner_text()
    assert opened.evaluate(
        "[...document.querySelectorAll('*')].every((e) => !e.getAttributeNames().some((name) => name.startsWith('on')))"
    )


@pytest.mark.parametrize("kind", ["report"])
@pytest.mark.parametrize("name", ["1000"])
def test_a_thousand_classes_are_sorted(opened: Page, kind: str, name: str) -> None:
    table = opened.locator("#classes table").first
    assert table.locator("tbody tr").count() == 1000
    table.locator("th button").last.click()
    values = [float(text.split()[0]) for text in table.locator("tbody td:last-child").all_inner_texts()]
    assert values == sorted(values)
    assert len(set(values)) > 2
