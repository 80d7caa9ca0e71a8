"""Pages show the numbers of the report, are safe against malicious names, and claim no more than the data support."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.reporting import charts
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.comparison import compare
from classwise.reporting.corruptions import CorruptionInfo, Corruptions
from classwise.reporting.effort import AttackInfo, AuditInfo, ClassEffort, StageInfo
from classwise.reporting.examples import Answered, Broken, BrokenExamples
from classwise.reporting.figures import place_label, png
from classwise.reporting.pages import comparison_fragment, comparison_page, report_fragment, report_page
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.reporting.results import ComparisonData
from classwise.reporting.sanity import Finding, Sanity
from classwise.reporting.wording import comparison_facts, comparison_verdict, report_verdict
from classwise.storage.verdicts import Verdicts

CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NATURAL = [857, 922, 718, 645, 780, 715, 875, 848, 895, 875]
PGD = [623, 749, 340, 250, 327, 449, 547, 615, 697, 679]
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onclick='x",
    "{{ 7*7 }}",
    "\u202eright\x07\ud800",
]


def make_report(
    kept: Mapping[str, Sequence[int]],
    *,
    n: int | Sequence[int],
    classes: Sequence[str] | None = None,
    name: str = "model",
    findings: Sequence[Finding] = (),
    first_index: int = 0,
    attacks: dict[str, AttackInfo] | None = None,
) -> ClassReport:
    """The first ``kept[key][k]`` examples of class k survive ``key``; the others are predicted as the next class."""
    k = len(next(iter(kept.values())))
    sizes = [n] * k if isinstance(n, int) else list(n)
    label = np.repeat(np.arange(k), sizes)
    rank = np.concatenate([np.arange(size) for size in sizes])
    columns = {key: np.where(rank < np.asarray(counts)[label], label, (label + 1) % k) for key, counts in kept.items()}
    verdicts = Verdicts(
        index=np.arange(len(label)) + first_index, label=label, natural=columns.pop("natural"), attacks=columns
    )
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="made", split="test", n=len(label), classes=list(classes or map(str, range(k)))),
        model={"name": name, "parameters": 11173962, "versions": {"torch": "2.11.0"}},
        threat=ThreatInfo(norm="Linf", eps=8 / 255, eps_text="8/255"),
        attacks=attacks or {},
        sanity=Sanity(findings=list(findings)),
    )


def cifar_report(**changes: object) -> ClassReport:
    return make_report({"natural": NATURAL, "pgd": PGD}, n=1000, classes=CIFAR, name="trades", **changes)  # type: ignore[arg-type]


class Page(HTMLParser):
    """Elements, tables by their region's label, and all text; fails on tags that do not match."""

    VOID = frozenset({"meta", "input", "br", "img", "hr", "link"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.tips: list[str] = []
        self.drawn: list[tuple[str, list[str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self._table: list[list[str]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag not in self.VOID:
            self._open.append(tag if given.get("class") != "pct" else "hidden")
        if tag == "svg":
            self.drawn.append((str(given["aria-label"]), []))
        if tag == "text" and given.get("class") != "pct":
            self.drawn[-1][1].append("")
        if tag == "div" and given.get("class") == "scroll":
            self._table = self.tables.setdefault(str(given["aria-label"]), [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th") and self._table:
            self._table[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() in (tag, "hidden")

    def handle_data(self, data: str) -> None:
        if "style" in self._open or "hidden" in self._open:
            return
        if "script" in self._open:
            self.scripts.append(data)
            return
        if "svg" in self._open:
            if "title" in self._open:
                self.tips.append(data)
            elif "text" in self._open:
                self.drawn[-1][1][-1] += data
            return
        self.text += data
        if self._table and self._table[-1] and ("td" in self._open or "th" in self._open):
            self._table[-1][-1] += data

    def all(self, tag: str, css: str | None = None) -> list[dict[str, str | None]]:
        found = [attrs for name, attrs in self.elements if name == tag]
        return found if css is None else [a for a in found if css in (a.get("class") or "").split()]


def one_decimal(value: float) -> str:
    return f"{value:.1f}"


# The report


def test_verdict() -> None:
    assert report_verdict(cifar_report()) == (
        "Weakest class: cat. 25.0% (22.4–27.8) of its images stay correct under attack, 52.8% of all images; "
        "the best class is 49.9 points higher."
    )


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (
            {"natural": [9, 5]},
            "Weakest class: 1. 50.0% (23.7–76.3) of its images are classified correctly",
        ),
        ({"natural": [9, 9], "pgd": [0, 0]}, "No image of any class stays correct under attack."),
        (
            {"natural": [9, 9, 9], "pgd": [2, 2, 5]},
            "Weakest classes: 0 and 1. 20.0% (5.7–51.0) of their images stay correct under attack, 30.0% of all images",
        ),
        ({"natural": [9] * 6, "pgd": [2, 2, 2, 2, 2, 5]}, "Weakest classes: 0 and 4 other classes. 20.0%"),
        ({"natural": [9, 9], "pgd": [4, 4]}, "All classes are equal: 40.0% (16.8–68.7) of the images of each stay"),
    ],
)
def test_verdict_at_the_edges(kept: dict[str, list[int]], expected: str) -> None:
    assert report_verdict(make_report(kept, n=10)).startswith(expected)


def test_missing_examples_are_stated() -> None:
    empty = make_report({"natural": [0, 0]}, n=0)
    assert report_verdict(empty) == "There are no examples."
    assert "no examples" in Page(report_page(empty)).text
    report_fragment(empty)


def test_numbers_on_the_page_are_those_of_the_report() -> None:
    report = cifar_report()
    page = Page(report_page(report))
    head, *rows = page.tables["Accuracy of every class"]
    assert head == ["Class", "n", "natural", "pgd", "worst-case"]
    for label, row in enumerate(rows):
        parts = [report[key].by_class[label] for key in ("natural", "pgd", "worst-case")]
        shown = [f"{part.value:.1f} {part.low:.1f}–{part.high:.1f}" for part in parts]
        assert row == [CIFAR[label], "1,000", *shown]
    for row, (key, result) in zip(page.tables["Results"][1:], report.results.items(), strict=True):
        worst = result.worst
        assert worst is not None
        assert row[0] == key
        assert row[1] == f"{result.overall.value:.1f} {result.overall.low:.1f}–{result.overall.high:.1f}"
        assert [cell.strip() for cell in row[2:4]] == [
            worst.name,
            f"{worst.value:.1f} {worst.low:.1f}–{worst.high:.1f}",
        ]
        assert row[4].startswith(one_decimal(worst.corrected.value))
        assert row[5:] == [one_decimal(result.cv or 0), one_decimal(result.mcd or 0), "10,000"]


def bar_lengths(page: Page, chart: int) -> list[tuple[str, float]]:
    """The tooltips of a chart's bars and their lengths relative to the axis from 0 to 100."""
    html = page.html.split('<svg class="chart')[1 + chart].split("</svg>")[0]
    axis = [float(x) for x in re.findall(r'text-anchor:middle[^>]* x="([\d.]+)"[^>]*>(?:0|100)<', html)]
    bars = re.findall(r'<g class="bar"><title>([^<]*)</title><path d="M([\d.]+) [\d.]+L([\d.]+) ', html)
    return [(tip, 100 * (float(end) - float(start)) / (axis[1] - axis[0])) for tip, start, end in bars]


def test_bars_are_as_long_as_the_accuracies_and_sorted() -> None:
    page = Page(report_page(cifar_report()))
    order = sorted(range(10), key=lambda k: PGD[k])
    for chart, key in ((0, "worst-case"), (1, "worst-case"), (2, "pgd"), (3, "pgd")):  # each narrow and wide
        bars = bar_lengths(page, chart)
        for name, counts, drawn in (("natural", NATURAL, bars[:10]), (key, PGD, bars[10:])):
            assert [tip.split(":")[0] for tip, _ in drawn] == [f"{CIFAR[k]}, {name}" for k in order]
            assert [length for _, length in drawn] == pytest.approx([counts[k] / 10 for k in order], abs=0.2)
    assert len(re.findall(r'<g class="bar"><title>[^<]*</title><path [^>]*fill:var\(--accent\)"', page.html)) == 4


def test_intervals_are_in_the_charts() -> None:
    report = cifar_report()
    page = Page(report_page(report))
    cat = report["pgd"].by_class[3]
    assert f"cat, pgd: {cat.value:.1f} ({cat.low:.1f}–{cat.high:.1f})" in page.tips
    label, texts = page.drawn[1]
    assert f"cat {cat.value:.1f}% ({cat.low:.1f}–{cat.high:.1f})" in label
    assert f"{cat.low:.1f}–{cat.high:.1f}" in texts


def test_confusion_counts_and_shares() -> None:
    report = cifar_report()
    page = Page(report_page(report))
    lines = page.tables["Confusion matrix"]
    worst_case = lines[1:11]
    assert [row[0] for row in worst_case] == CIFAR
    assert [[int(cell) for cell in row[1:]] for row in worst_case] == report.confusion["worst-case"]
    drawn = next(texts for label, texts in page.drawn if label.startswith("Confusion matrix, worst-case"))
    numbers = [int(text) for text in drawn if text.isdigit()]
    assert numbers == [count for row in report.confusion["worst-case"] for count in row]
    assert len(page.all("text", "pct")) == len(page.all("text", "cnt")) == 300
    assert "cat predicted as deer: 750 of 1,000, 75.0%" in page.tips
    assert "cat correct: 250 of 1,000, 25.0%" in page.tips


def test_superclasses_are_adjacent_in_the_confusion_matrix() -> None:
    report = cifar_report()
    groups = {"transportation": [0, 1, 8, 9], "animals": [2, 3, 4, 5, 6, 7]}
    report = report.model_copy(update={"dataset": report.dataset.model_copy(update={"superclasses": groups})})
    page = Page(report_page(report))
    order = [label for labels in groups.values() for label in labels]
    header, *rows = page.tables["Confusion matrix"][:11]
    assert header[1:] == [row[0] for row in rows] == [CIFAR[label] for label in order]
    counts = np.array(report.confusion["worst-case"])[np.ix_(order, order)]
    assert [[int(cell) for cell in row[1:]] for row in rows] == counts.tolist()
    drawn = charts.confusion_matrix(report, "pgd")
    assert drawn is not None
    assert drawn.plot.groups == [4]  # type: ignore[union-attr]
    assert drawn.plot.names == [CIFAR[label] for label in order]  # type: ignore[union-attr]
    assert "transportation and animals" in page.text


def test_the_command_is_shown_as_it_was_typed() -> None:
    typed = "classwise evaluate --model 'runs/a b' --data cifar10"
    html = report_page(cifar_report().model_copy(update={"command": typed}))
    assert typed in Page(html).text
    assert Page(html).all("pre")


def test_images_of_the_weakest_class_are_shown_with_their_predictions() -> None:
    report = cifar_report()
    pixels = png(np.full((3, 4, 4), 0.5))
    answered = {"of_label": 10.0}
    one = Broken(
        index=7,
        label=3,
        name="cat",
        before=Answered(label=3, name="cat", confidence=61.0, **answered),
        after=Answered(label=5, name="<b>dog</b>", confidence=52.5, **answered),
        margin=-0.5,
        size=0.03,
        natural_png=pixels,
        change_png=pixels,
        adversarial_png=pixels,
        attack="pgd",
    )
    report.keep_examples(BrokenExamples(name="cat", broken=750, amplify=16.0, examples=[one]))
    page = Page(report_page(report))
    assert "cat (61.0%) → <b>dog</b> (52.5%)" in page.text
    assert "1 of 750 images of the weakest class" in page.text
    assert [image["alt"] for image in page.all("img")] == [
        "image 7, a cat, natural",
        "the change of image 7, magnified 16 times",
        "image 7 after pgd",
    ]


def test_attacks_that_broke_the_examples_are_shown() -> None:
    report = make_report({"natural": [90, 80], "pgd": [50, 40], "square": [45, 60]}, n=100)
    rows = Page(report_page(report)).tables["First attack that broke each example"][1:]
    assert [row[2] for row in rows] == ["30", "80", "5", "85"]
    assert sum(int(row[2]) for row in rows) == 200


def test_missing_verdicts_are_stated() -> None:
    report = ClassReport.model_validate(cifar_report().model_dump(by_alias=True))
    assert report.verdicts is None
    assert "the table of verdicts is missing" in Page(report_page(report)).text


def test_settings_findings_and_model_are_shown() -> None:
    attack = AttackInfo(
        spec="pgd:steps=20",
        settings="PGD(target=None, steps=20, step_size=None)",
        attacked=8130,
        rejected=3,
        seconds=14.2,
        forwards=162600,
        backwards=162601,
    )
    findings = [Finding(severity="info", text="all well"), Finding(severity="warning", text="gradients vanish")]
    page = Page(report_page(cifar_report(attacks={"pgd": attack}, findings=findings)))
    row = page.tables["Attacks and their settings"][1]
    assert row == ["pgd", "pgd:steps=20", "PGD(steps=20)", "8,130", "3", "162,600", "162,601", "14.2"]
    assert page.text.index("gradients vanish") < page.text.index("Results")  # a warning is not hidden at the end
    assert re.search(r"Warning\s+gradients vanish\s*Note\s+all well", page.text)
    for shown in ("8/255", "0.0313725", "11,173,962", "versions torch", "2.11.0"):
        assert shown in page.text


def test_stages_variants_and_costs_are_shown() -> None:
    stages = [
        StageInfo(
            name=name,
            settings="",
            whom=whom,
            attacked=attacked,
            broke=broke,
            rejected=0,
            seconds=1.5,
            forwards=400,
            backwards=8,
        )
        for name, whom, attacked, broke in (("apgd-ce", "survivors", 80, 30), ("square", "sample", 50, 0))
    ]
    seen: dict[str, Any] = {"left": 1200, "nearest": 50, "random": 40, "broke": 2, "broke_random": 0, "at_most": 7.2}
    by_class = [ClassEffort(label=k, name=str(k), attacked=8 * (k != 3), forwards=40, backwards=1) for k in range(10)]
    shown = {"spec": "s", "settings": "S()", "attacked": 80, "rejected": 0, "seconds": 3.0}
    attacks = {
        "pgd": AttackInfo(**shown, stages=stages, by_class=by_class, audit=AuditInfo(**seen)),
        "masked": AttackInfo(**shown, audit=AuditInfo(**seen, doubts=["zero-gradient", "audit-square: 3 broken"])),
        "grid": AttackInfo(**shown, strongest="grid:inv_t=5"),
    }
    page = Page(report_page(cifar_report(attacks=attacks)))
    assert page.tables["Stages of pgd"][1:] == [
        ["apgd-ce", "all remaining", "80", "30", "400", "8", "1.5"],
        ["square", "a sample", "50", "0", "400", "8", "1.5"],
    ]
    assert [row[1] for row in page.tables["Passes by class"][1:]] == ["5.0 + 0.1"] * 3 + ["–"] + ["5.0 + 0.1"] * 6
    text = " ".join(page.text.split())
    assert "Strongest variant of grid, reported in its place: grid:inv_t=5." in text
    assert (
        "Audit: of 1,200 examples that survive the cascade, the full ensemble broke 2 of the 50 with the smallest "
        "margins and 0 of 40 drawn at random (95% upper bound: 7.2% of all). The fallback was not triggered."
    ) in text
    assert (
        "Fallback triggered (zero-gradient and audit-square: 3 broken): "
        "the full ensemble ran on all surviving examples."
    ) in text


def test_adaptive_evaluation_is_described() -> None:
    report = cifar_report()
    found = AllocationInfo(
        asked=2,
        reached=False,
        rounds=3,
        label=3,
        value=20,
        low=17.1,
        high=22.9,
        contenders=[3, 4],
        attacked=[50] * 10,
        available=[1000] * 10,
    )
    shown = " ".join(Page(report_page(report.model_copy(update={"allocation": found}))).text.split())
    names = report.dataset.classes
    assert (
        "Target: 95% interval of the worst class within ±2.0 points; not reached: with all examples of the candidate "
        f"classes, the interval would be wider (±2.9; candidates: {names[3]} and {names[4]}). "
        "500 of 10,000 examples were attacked in 3 rounds."
    ) in shown
    assert "Target:" not in Page(report_page(report)).text


def test_corruptions_have_a_section_of_their_own() -> None:
    report = make_report({"natural": [9, 8], "pgd": [5, 2]}, n=10)
    label = np.repeat([0, 1], 10)
    kinds = [
        ("fog", "weather", 1, 6),
        ("fog", "weather", 5, 2),
        ("snow", "weather", 5, 10),
        ("contrast", "digital", 1, 0),
    ]
    verdicts = Verdicts.pending(np.arange(20), label, [], corrupted=[f"{kind}/{at}" for kind, _, at, _ in kinds])
    for kind, _, at, kept in kinds:
        verdicts.corrupted[f"{kind}/{at}"] = np.where(np.arange(20) % 10 < kept, label, 1 - label)
    infos = [CorruptionInfo(key=f"{kind}/{at}", kind=kind, family=family, severity=at) for kind, family, at, _ in kinds]
    section = Corruptions.from_verdicts(verdicts, infos, ["a", "b"])
    page = Page(report_page(report.model_copy(update={"corruptions": section})))
    assert page.tables["Accuracy by kind and severity"][1:] == [
        ["weather", "fog", "60.0", "20.0"],
        ["weather", "snow", "–", "100.0"],
        ["digital", "contrast", "0.0", "–"],
    ]
    rows = page.tables["Accuracy by class and family"]
    assert rows[0] == ["Class", "weather", "digital"]
    assert [cell.split()[0] for cell in rows[1]] == ["0", "60.0", "0.0"]
    assert "Natural corruptions" not in Page(report_page(report)).text


def test_class_without_examples_is_a_dash_not_zero() -> None:
    report = make_report({"natural": [9, 0, 8], "pgd": [5, 0, 2]}, n=[10, 0, 10], classes=["a", "b", "c"])
    page = Page(report_page(report))
    row = page.tables["Accuracy of every class"][2]
    assert [cell.split() for cell in row] == [["b"], ["0"], ["–", "no", "examples"]]
    assert len(page.all("g", "bar")) == 2 * 2 * 2 * 2  # classes, results, charts, widths
    assert " no examples" in page.drawn[0][1] or "no examples" in page.drawn[0][1]
    assert "no examples" in Page(report_fragment(report)).text
    comparison = compare(report, report, names=["x", "y"])
    assert Page(comparison_page(comparison)).tables["Change of every class against the baseline"][3][0] == "b"


def test_natural_alone_needs_no_switch() -> None:
    page = Page(report_page(make_report({"natural": [9, 5]}, n=10)))
    assert [a["name"] for a in page.all("input")].count("show") == 1
    assert not [tip for tip in page.tips if "worst-case" in tip]
    assert len(page.all("g", "bar")) == 2 * 2
    assert "No attack ran." in page.text


@pytest.mark.parametrize("k", [2, 10, 40, 41, 200])
def test_any_number_of_classes(k: int) -> None:
    kept = {"natural": [10] * k, "pgd": [(7 * i) % 9 + 1 for i in range(k)]}
    report = make_report(kept, n=10)
    html = report_page(report)
    page = Page(html)
    assert len(page.tables["Accuracy of every class"]) == 1 + k
    many = k > charts.MANY_CLASSES
    assert len(page.all("g", "bar")) == 2 * 2 * 2 * (25 if many else k)
    assert ("Confusion matrix" in page.tables) != many
    drawn = [label for label, _ in page.drawn if label.startswith("Confusion matrix")]
    assert len(drawn) == 3
    comparison = compare(report, report, names=["x", "y"])
    changes = Page(comparison_page(comparison)).tables["Change of every class against the baseline"]
    assert len(changes) == 3 * (2 + min(k, 40))
    if k <= 10:
        assert len(html.encode()) < 300_000


def test_ties_of_many_classes_mark_none() -> None:
    page = Page(report_page(make_report({"natural": [9] * 6, "pgd": [0] * 6}, n=10)))
    assert "var(--accent" not in "".join(page.html.split("<svg")[1:3])


def test_a_confusion_matrix_of_too_many_classes_is_left_out() -> None:
    k = charts.MOST_DRAWN + 1
    page = Page(report_page(make_report({"natural": [5] * k, "pgd": [1] * k}, n=5)))
    assert "is too large for a page" in page.text
    assert len(page.html.encode()) < 1_000_000


# What reaches the page from outside


def hostile_pages() -> list[str]:
    kept = {"natural": [9, 8, 8, 7, 9], "pgd": [5, 4, 3, 2, 1], "</style><script>y</script>": [5, 5, 5, 5, 5]}
    finding = Finding(severity="error", text="<script>alert(2)</script>")
    attack = AttackInfo(spec="<b>", settings="<script>", attacked=1, rejected=0, seconds=0.1)
    reports = [
        make_report(kept, n=10, classes=HOSTILE, name=name, findings=[finding], attacks={"<i>": attack})
        for name in ('<img src=x onerror="alert(3)">', "</title><script>z</script>")
    ]
    comparison = compare(*reports)
    return [
        report_page(reports[0]),
        report_fragment(reports[0]),
        comparison_page(
            comparison,
            title="</title><script>",
            story=["<script>story</script>"],
            links={comparison.models[0]: 'a"onclick="x.html'},
        ),
        comparison_page(comparison),
        comparison_fragment(comparison),
    ]


@pytest.mark.parametrize("number", range(5))
def test_hostile_names_stay_text(number: int) -> None:
    html = hostile_pages()[number]
    page = Page(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "iframe", "object"}
    assert_only_our_script(page)
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert 'onerror="alert(3)">' in page.text
    assert "<script>" in page.text
    html.encode("utf-8")  # undecodable bytes in a name must not make the file unwritable
    assert "\u202e" not in html


def assert_only_our_script(page: Page) -> None:
    """Require at most one script, and only the one whose digest the page's policy allows."""
    assert len(page.scripts) == len(page.all("script")) <= 1
    for script in page.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        assert f"script-src 'sha256-{digest}'" in (policy or "")
        assert "unsafe" not in (policy or "").replace("style-src 'unsafe-inline'", "")


@pytest.mark.parametrize("number", range(5))
def test_pages_load_no_resources_and_run_no_code(number: int) -> None:
    html = hostile_pages()[number]
    assert "://" not in html
    page = Page(html)
    assert not [a for _, attrs in page.elements for a in ("src", "srcset", "action", "data") if a in attrs]
    assert "url(" not in html
    assert "@import" not in html


def test_fragments_bring_no_style_sheet() -> None:
    report = cifar_report()
    for html in (report_fragment(report), comparison_fragment(compare(report, report, names=["x", "y"]))):
        page = Page(html)
        assert not page.all("style")
        assert not page.all("html")
        assert "52.8" in page.text


@pytest.mark.parametrize("href", ["https://example.org/", "//example.org/x", "javascript:alert(1)", " java\tscript:x"])
def test_links_must_be_relative(href: str) -> None:
    report = cifar_report()
    with pytest.raises(InputError, match="relative path"):
        comparison_page(compare(report, report, names=["x", "y"]), links={"x": href})


def test_links_of_unknown_models_are_refused() -> None:
    report = cifar_report()
    with pytest.raises(InputError, match="unknown model 'z'"):
        comparison_page(compare(report, report, names=["x", "y"]), links={"z": "z.html"})


# The comparison


def two(before: Sequence[int], after: Sequence[int], n: int = 100, **changes: int) -> ComparisonData:
    natural = [n] * len(before)
    one = make_report({"natural": natural, "pgd": before}, n=n, name="base")
    other = make_report({"natural": natural, "pgd": after}, n=n, name="new", first_index=changes.get("shift", 0))
    return compare(one, other)


def test_significant_gain_is_reported() -> None:
    found = two([60, 10, 70], [58, 45, 68])
    assert comparison_verdict(found) == (
        "new raises the worst class of base from 10.0% (class 1) to 45.0% (class 1): +35.0 points (p < 0.001, n = 100)."
    )
    (fact,) = comparison_facts(found)
    assert fact == (
        "new",
        "worst class +35.0 points, to 45.0% (class 1) (p < 0.001, n = 100); significant changes: class 1 +35.0",
    )


def test_insignificant_change_is_not_reported_as_a_gain() -> None:
    found = two([60, 33, 70], [60, 36, 69])
    assert comparison_verdict(found).startswith(
        "new does not change the worst class of base significantly: from 33.0% (class 1) to 36.0% (class 1), +3.0"
    )
    (fact,) = comparison_facts(found)
    assert fact[1].startswith("worst class +3.0 points, to 36.0% (class 1) (p = ")
    assert "significant" not in fact[1]


def test_another_worst_class_is_named() -> None:
    found = two([60, 10, 70], [35, 65, 70])
    assert comparison_verdict(found) == (
        "new raises the worst class of base from 10.0% (class 1) to 35.0% (class 0): +25.0 points "
        "(intervals do not overlap)."
    )
    assert "significant changes: class 1 +55.0 and class 0 −25.0" in comparison_facts(found)[0][1]


def test_another_worst_class_with_overlapping_intervals() -> None:
    assert comparison_verdict(two([60, 30, 70], [36, 65, 70])) == (
        "new does not change the worst class of base significantly: from 30.0% (class 1) to 36.0% (class 0), "
        "+6.0 points (intervals overlap)."
    )


def test_loss_is_reported_as_a_loss() -> None:
    found = two([60, 40, 70], [60, 10, 30])
    assert comparison_verdict(found).startswith(
        "new lowers the worst class of base from 40.0% (class 1) to 10.0% (class 1): −30.0 points"
    )
    assert "significant changes: class 2 −40.0 and class 1 −30.0" in comparison_facts(found)[0][1]


def test_rho_without_a_baseline_is_a_dash() -> None:
    found = two([60, 0, 70], [60, 10, 70])
    assert found.rho is None
    assert Page(comparison_page(found)).tables["Models"][2][7] == "–"


def test_a_baseline_without_robustness() -> None:
    assert "from 0.0% (class 0, class 1 and class 2) to 10.0% (class 1)" in comparison_verdict(
        two([0, 0, 0], [60, 10, 70])
    )


def test_unpaired_models_are_compared_by_intervals_only() -> None:
    found = two([60, 10, 70], [58, 45, 68], shift=1)
    assert "+35.0 points (intervals do not overlap)" in comparison_verdict(found)
    facts = comparison_facts(found)
    assert facts[-1][1].startswith("The models were not measured on the same examples")
    assert not any("p <" in text or "p =" in text for _, text in facts)


def test_comparison_page_shows_its_numbers() -> None:
    natural = [100] * 3
    base = make_report({"natural": natural, "pgd": [60, 10, 70]}, n=100, name="base")
    new = make_report({"natural": natural, "pgd": [58, 45, 68]}, n=100, name="new")
    comparison = compare(base, new)
    page = Page(comparison_page(comparison, links={"new": "new/report.html"}))
    models = page.tables["Models"][1:3]
    for shown, row in zip(models, comparison["worst-case"], strict=True):
        assert row.worst is not None
        assert shown[0].startswith(row.model)
        assert shown[1] == f"{row.overall.value:.1f} {row.overall.low:.1f}–{row.overall.high:.1f}"
        assert shown[2].strip() == "1"
        assert shown[3] == f"{row.worst.value:.1f} {row.worst.low:.1f}–{row.worst.high:.1f}"
        assert shown[5:7] == [one_decimal(row.cv or 0), one_decimal(row.mcd or 0)]
    assert models[1][7] == "+3.721"
    changes = page.tables["Change of every class against the baseline"][:5]
    assert [row[0] for row in changes[1:]] == ["all classes", "0", "1", "2"]
    assert changes[2][2] == "58.0 −2.0 not significant, p = 1; 0 gained, 2 lost"
    assert changes[3][2] == "45.0 +35.0 p < 0.001; 35 gained, 0 lost"
    assert {"href": "new/report.html"} in page.all("a")
    bars = [bar for bar in bar_lengths(page, 1) if ", new:" in bar[0]]
    assert [length for _, length in bars] == pytest.approx([45.0, 58.0, 68.0], abs=0.1)
    assert "not significant" not in changes[3][2]


def test_only_significant_changes_are_bold() -> None:
    html = comparison_page(
        compare(
            make_report({"natural": [100, 100], "pgd": [60, 10]}, n=100, name="base"),
            make_report({"natural": [100, 100], "pgd": [62, 45]}, n=100, name="new"),
        )
    )
    cells = re.findall(r'<td class="[^"]*significant"><bdi>([^<]*)</bdi>', html)
    assert "45.0 +35.0" in cells
    assert not [cell for cell in cells if "+2.0" in cell]


def test_a_given_text_follows_the_charts() -> None:
    report = cifar_report()
    html = comparison_page(compare(report, report, names=["x", "y"]), title="Title", story=["Once.", "Twice."])
    assert html.index("Title</h1>") < html.index("<svg") < html.index("Once.") < html.index("Twice.")


def test_the_charts_come_before_every_paragraph_but_the_verdict() -> None:
    report = cifar_report()
    html = comparison_page(compare(report, report, report, report, names=["w", "x", "y", "z"]))
    before = html[html.index("<h1") : html.index("<svg")]
    assert before.count("<p") == 1
    assert report_page(report)[: report_page(report).index("<svg")].count('<p class="note"') == 0


def test_unpaired_comparison_is_stated() -> None:
    base = make_report({"natural": [100, 100], "pgd": [60, 10]}, n=100, name="base")
    new = make_report({"natural": [100, 100], "pgd": [62, 45]}, n=100, name="new", first_index=7)
    page = Page(comparison_page(compare(base, new)))
    assert "were not measured on the same examples" in page.text
    assert "no paired test" in page.text
    assert "No paired test." in page.text
    assert page.tables["Change of every class against the baseline"][3] == ["1", "10.0", "45.0"]


def test_many_models_keep_their_rows() -> None:
    reports = [make_report({"natural": [9, 9], "pgd": [3, i % 9]}, n=10, name=f"m{i}") for i in range(8)]
    page = Page(comparison_page(compare(*reports)))
    assert len(page.tables["Models"]) == 3 * 9
    assert {tip.split(", ")[1].split(":")[0] for tip in page.tips if tip[0].isdigit()} == {f"m{i}" for i in range(6)}
    assert "first 6 of 8 models" in page.text


# Charts


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300)), min_size=1, max_size=6))
def test_names_of_points_do_not_cover_each_other(points: list[tuple[float, float]]) -> None:
    taken: list[tuple[float, float, float, float]] = []
    for x, y in points:
        place_label(x, y, 60, 12, taken, (0, 0, 400, 400))
    apart = [
        min(one[2], other[2]) <= max(one[0], other[0]) or min(one[3], other[3]) <= max(one[1], other[1])
        for k, one in enumerate(taken)
        for other in taken[:k]
    ]
    assert all(apart)


def test_the_pareto_front_is_drawn() -> None:
    def drawn(*pgd: list[int]) -> list[tuple[float, float]]:
        reports = [make_report({"natural": [90] * 3, "pgd": one}, n=100, name=f"m{i}") for i, one in enumerate(pgd)]
        figure = charts.average_and_worst(compare(*reports)["pgd"])
        assert figure is not None
        return [(round(x), y) for x, y in figure.plot.front]  # type: ignore[union-attr]

    assert drawn([90, 80, 10], [70, 60, 30], [60, 50, 40], [40, 40, 20]) == [(50, 40), (53, 30), (60, 10)]
    assert drawn([50, 50, 10], [90, 90, 60], [50, 40, 20]) == [(80, 60)]


def test_radar_has_a_corner_for_every_class() -> None:
    report = cifar_report()
    found = compare(report, report, names=["x", "y"])
    assert (
        sum(label.startswith("Accuracy of each class around") for label, _ in Page(comparison_page(found)).drawn) == 6
    )
    radar = charts.class_radar(found["pgd"], CIFAR)
    assert radar is not None
    (axes,) = radar.plot.draw(400, 10).axes  # type: ignore[union-attr]
    assert [len(line.get_xdata()) for line in axes.lines] == [11, 11]  # type: ignore[arg-type]
    two = make_report({"natural": [9, 8], "pgd": [5, 4]}, n=10)
    assert charts.class_radar(compare(two, two, names=["x", "y"])["pgd"], ["0", "1"]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_not_dominated_and_all_others_are(points: list[tuple[int, int]]) -> None:
    def beaten(one: tuple[int, int]) -> bool:
        return any(a >= one[0] and b >= one[1] and (a, b) != one for a, b in points)

    kept = charts.front([(float(a), float(b)) for a, b in points])
    assert sorted(kept) == [number for number, one in enumerate(points) if not beaten(one)]
    assert [points[number] for number in kept] == sorted(points[number] for number in kept)


def test_selection_keeps_requested_classes() -> None:
    chosen = charts.select([float(i) for i in range(100)], keep=[50])
    assert chosen.labels == [*range(20), 50, 95, 96, 97, 98, 99]
    assert chosen.left_out == 74
    assert chosen.gap == (21, "74 classes in between")
