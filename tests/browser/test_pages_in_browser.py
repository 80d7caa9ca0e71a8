"""The pages in a browser: no network, no errors, a working attack switch, no horizontal scroll, light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classwise.reporting.comparison import compare
from classwise.reporting.effort import AttackInfo
from classwise.reporting.pages import comparison_page, report_page
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.reporting.site import write_site
from classwise.storage.verdicts import Verdicts

pytest.importorskip("playwright")
from playwright.sync_api import Page

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NATURAL = [86, 92, 72, 64, 78, 71, 87, 85, 89, 87]
PGD = [62, 75, 34, 25, 33, 45, 55, 61, 70, 68]
SQUARE = [70, 80, 41, 38, 30, 52, 60, 68, 75, 72]


def make_report(name: str, shift: int) -> ClassReport:
    label = np.repeat(np.arange(10), 100)
    rank = np.tile(np.arange(100), 10)

    def predictions(counts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.where(rank < np.asarray(counts)[label], label, (label + 1) % 10)

    verdicts = Verdicts(
        index=np.arange(1000),
        label=label,
        natural=predictions(NATURAL),
        attacks={"pgd": predictions([count + shift for count in PGD]), "square": predictions(SQUARE)},
    )
    settings = AttackInfo(
        spec="pgd:steps=20", settings="PGD(steps=20, " + "x" * 90 + ")", attacked=811, rejected=0, seconds=1.0
    )
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="cifar10", split="test", n=1000, classes=CLASSES),
        model={"name": name, "weights": "a/rather/long/path/" * 6},
        threat=ThreatInfo(norm="Linf", eps=8 / 255, eps_text="8/255"),
        attacks={"pgd": settings},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one, other = make_report("baseline", 0), make_report("a-model-with-a-rather-long-name", 9)
    pages = {
        "report": report_page(one),
        "comparison": comparison_page(compare(one, other), links={"baseline": "report.html"}),
    }
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    for name, report in (("one", one), ("other", other)):
        (folder / name).mkdir()
        report.to_json(folder / name / "report.json")
    write_site([folder / "one", folder / "other"], folder / "site", title="Leaderboard")
    return {name: folder / f"{name}.html" for name in pages} | {"site": folder / "site" / "index.html"}


@pytest.fixture
def opened(visit: Callable[..., Page], request: pytest.FixtureRequest, files: dict[str, Path]) -> Page:
    options = {"name": "report"} | getattr(request, "param", {})
    return visit(files[options.pop("name")], **options)


def shown_bars(page: Page) -> list[str]:
    """Return the labels of the bars in the visible chart, from the weakest class up."""
    charts = [chart for chart in page.locator("section.first .chart").all() if chart.is_visible()]
    return [str(title) for title in charts[0].locator(".bar title").all_text_contents()]


def every(**options: object) -> pytest.MarkDecorator:
    names = ["report", "comparison", "site"]
    return pytest.mark.parametrize("opened", [{"name": one, **options} for one in names], indirect=True, ids=names)


def test_switch_changes_the_bars(opened: Page) -> None:
    worst_case = shown_bars(opened)[10:]
    assert [bar.split(" (")[0] for bar in worst_case[:2]] == ["cat, worst-case: 25.0", "deer, worst-case: 30.0"]
    opened.locator("label[for=show-2]").click()
    square = shown_bars(opened)[10:]
    assert [bar.split(" (")[0] for bar in square[:2]] == ["deer, square: 30.0", "cat, square: 38.0"]
    assert opened.locator(".which:visible b").inner_text() == "deer"


def test_switch_works_from_the_keyboard(opened: Page) -> None:
    opened.locator("#show-0").focus()
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#show-1").is_checked()
    assert opened.locator(".show-1").is_visible()
    assert not opened.locator(".show-0").is_visible()


def test_confusion_has_a_switch_of_its_own(opened: Page) -> None:
    before = shown_bars(opened)
    opened.locator("label[for=mixed-1]").click()
    assert "Confusion matrix, natural" in str(opened.locator("#confusion .chart:visible").get_attribute("aria-label"))
    assert opened.locator("#confusion .chart:visible .cnt").first.text_content() == "86"
    assert shown_bars(opened) == before


def test_confusion_in_percent(opened: Page) -> None:
    texts = opened.locator("#confusion .chart:visible text:visible")
    assert "62" in texts.all_text_contents()
    opened.get_by_text("percent of the row").click()
    assert "62" not in texts.all_text_contents()
    assert "62.0" in texts.all_text_contents()


def test_heads_sort_the_table_up_and_down(opened: Page) -> None:
    table = opened.locator("#classes table")
    names = table.locator("tbody th")
    assert names.all_inner_texts() == CLASSES
    table.get_by_role("button", name="pgd").click()
    assert names.all_inner_texts() == [CLASSES[label] for label in np.argsort(PGD, kind="stable")]
    assert table.locator("th[aria-sort=ascending]").inner_text() == "pgd"
    table.get_by_role("button", name="pgd").press("Enter")
    assert names.first.inner_text() == "automobile"
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name="Class", exact=True).click()
    assert names.all_inner_texts() == sorted(CLASSES)


def test_text_is_copied_or_selected(opened: Page) -> None:
    opened.get_by_text("As CSV").click()
    box = opened.locator("#classes .code").first
    box.get_by_role("button").click()
    chosen = opened.evaluate("getSelection().toString()")
    assert chosen.strip() == box.locator("pre").inner_text().strip() != ""
    opened.wait_for_function("document.querySelector('#classes .copy').textContent !== 'Copy'")


@every()
def test_the_keyboard_reaches_every_control(opened: Page) -> None:
    """Tab reaches the selected radio button of a group; arrow keys select the others."""
    wanted = opened.evaluate(
        "[...document.querySelectorAll("
        "'button, select, a[href], summary, input:checked:not([hidden]), [tabindex=\"0\"]'"
        ")].filter((e) => e.checkVisibility()).length"
    )
    opened.locator("body").click(position={"x": 1, "y": 1})
    reached = set()
    for _ in range(3 * wanted):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    reached.discard(opened.evaluate("[...document.querySelectorAll('*')].indexOf(document.body)"))
    assert len(reached) == wanted > 3


@pytest.mark.parametrize("opened", [{"name": "comparison"}], indirect=True)
def test_switch_of_the_comparison(opened: Page) -> None:
    before = opened.locator("table.models:visible tbody tr").first.inner_text()
    opened.locator("fieldset").get_by_text("natural", exact=True).click()
    assert opened.locator("table.models:visible tbody tr").first.inner_text() != before
    assert opened.locator("table.models:visible").count() == 1


@every(width=375)
def test_a_phone_does_not_scroll_sideways(opened: Page) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth") <= 375
    for number in range(opened.locator("input[name=show]:not([hidden])").count()):
        opened.locator(f"label[for=show-{number}]").click()
        assert opened.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_chart_labels_are_readable_and_do_not_overlap(
    visit: Callable[..., Page], files: dict[str, Path], name: str, scheme: str
) -> None:
    page = visit(files[name], scheme=scheme)
    found = page.evaluate(
        """[...document.querySelectorAll('section.first .chart')].filter((e) => e.checkVisibility()).map((chart) =>
        [...chart.querySelectorAll('text')].map((text) => {
          const box = text.getBoundingClientRect();
          return [text.textContent, box.left, box.top, box.right, box.bottom, getComputedStyle(text).fill];
        }))"""
    )
    dark = scheme == "dark"
    for chart in found:
        for place, (text, left, top, right, bottom, fill) in enumerate(chart):
            red, green, blue = (int(part) for part in re.findall(r"\d+", fill)[:3])
            assert (red + green + blue > 300) == dark or max(red, green, blue) > 150, (text, fill)
            for other, x0, y0, x1, y1, _ in chart[:place]:
                across, down = min(right, x1) - max(left, x0), min(bottom, y1) - max(top, y0)
                assert across <= 1 or down <= 3, (text, other)


@every(width=375)
def test_wide_tables_show_that_they_scroll(opened: Page) -> None:
    wide = opened.evaluate(
        "[...document.querySelectorAll('.scroll')]"
        ".filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)"
        ".map((e) => e.classList.contains('more'))"
    )
    assert wide
    assert all(wide)


@every()
def test_first_screen_holds_verdict_and_bars(opened: Page) -> None:
    heading = opened.locator("h1").bounding_box()
    assert heading is not None
    assert heading["y"] + heading["height"] < 300
    first_row = opened.locator("tbody tr:visible, .chart:visible").first.bounding_box()
    assert first_row is not None
    assert first_row["y"] < 800


def luminance(page: Page, selector: str, rule: str) -> float:
    color = page.evaluate(
        f"getComputedStyle(document.querySelector({selector!r})).{rule}.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    )
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in color)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("opened", [{"scheme": "light"}, {"scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_text_is_readable_in_both_schemes(opened: Page, request: pytest.FixtureRequest) -> None:
    paper = luminance(opened, "body", "backgroundColor")
    assert (paper < 0.05) == ("dark" in request.node.name)
    for selector in ("h1", ".note", ".big", ".legend", "td small", ".which"):
        ink = luminance(opened, selector, "color")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, selector


@pytest.mark.parametrize("opened", [{"name": "site"}], indirect=True)
def test_the_leaderboard_filters_and_sorts(opened: Page) -> None:
    rows = opened.locator("tr.entry:visible")
    assert rows.count() == 2
    assert opened.locator("#count").inner_text() == "2 entries"
    opened.get_by_label("Result").select_option("natural")
    assert rows.locator("td:nth-child(4)").all_inner_texts()[0].startswith("64.0")
    opened.get_by_label("Result").select_option("all")
    assert rows.count() == 8
    opened.get_by_role("button", name="Average").click()
    values = [float(text.split()[0]) for text in rows.locator("td:nth-child(2)").all_inner_texts()]
    assert values == sorted(values)
    opened.get_by_role("link", name="report").first.click()
    assert "Robustness by class" in opened.locator("header").inner_text()


@every()
def test_pictures_have_names_and_tables_have_headers(opened: Page) -> None:
    unnamed = "svg:not([aria-hidden]):not([role=img][aria-label]), th:not([scope]), label:not([for])"
    assert opened.locator(unnamed).count() == 0
    assert opened.locator("select:not([id])").count() == 0


@every()
def test_printing_shows_everything_on_white(opened: Page) -> None:
    opened.emulate_media(media="print", color_scheme="dark")
    assert luminance(opened, "body", "backgroundColor") > 0.9
    assert opened.locator(".scroll:visible").first.evaluate("e => getComputedStyle(e).overflowX") == "visible"
