"""The trust section of a page: numbers of the probes, classes by name, and no rows for omitted probes."""

from __future__ import annotations

import re
from html import escape

import numpy as np
import pytest

from classwise.reporting.charts import probe_curves
from classwise.reporting.pages import report_page
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.reporting.sanity import (
    AgreementProbe,
    BlackBoxProbe,
    ClassProbe,
    Finding,
    NormalizationProbe,
    OutputProbe,
    Probes,
    RadiusProbe,
    Sanity,
    StepProbe,
)
from classwise.reporting.trust_section import trust_table
from classwise.storage.verdicts import Verdicts

CLASSES = ["ant", "7", "<b>cat</b>"]


def class_probe(label: int, **counts: int) -> ClassProbe:
    nothing = dict.fromkeys(ClassProbe.model_fields, 0)
    return ClassProbe(**(nothing | {"label": label, "n": 4, "survived": 3} | counts))


def make_probes(**changes: object) -> Probes:
    values = {
        "n": 12,
        "by_class": [class_probe(0), class_probe(1, zero_gradient=1), class_probe(2, zero_gradient=4, black_box=2)],
        "steps": [
            StepProbe(step=step, log_odds=loss, margin=loss, broken=0)
            for step, loss in ((0, -2.0), (1, -1.04), (10, 0.5))
        ],
        "radii": [RadiusProbe(eps=8 / 255, broken=3), RadiusProbe(eps=1.0, broken=12)],
        "black_box": BlackBoxProbe(queries=100, tried=9, broken=2),
        "rounding": 1e-4,
        "repeated": AgreementProbe(n=12, changed=1, difference=0.25),
        "company": AgreementProbe(n=0, changed=0, difference=None),
        "tremor": AgreementProbe(n=12, changed=0, difference=0.0),
        "output": OutputProbe(
            probabilities=0,
            one_hot=12,
            median_margin=123.456,
            surest=0.416,
            unmoved=5,
            not_finite=1,
            not_finite_beyond=2,
        ),
        "forwards": 1234,
        "backwards": 321,
    }
    return Probes(**(values | changes))


def make_report(sanity: Sanity) -> ClassReport:
    label = np.repeat([0, 1, 2], 4)
    return ClassReport.from_verdicts(
        Verdicts(index=np.arange(12), label=label, natural=label, attacks={"pgd": (label + 1) % 3}),
        dataset=DatasetInfo(name="insects", split="test", n=12, classes=CLASSES),
        model={"name": "net"},
        threat=ThreatInfo(norm="Linf", eps=8 / 255, eps_text="8/255"),
        attacks={},
        sanity=sanity,
    )


def rows(report: ClassReport) -> dict[str, str]:
    table = trust_table(report)
    assert table is not None
    return dict(table.rows)


def test_rows_hold_the_numbers_and_name_the_classes() -> None:
    shown = rows(make_report(Sanity(probes=make_probes())))
    assert shown["Gradient is zero, lost in rounding or not finite"] == "5 of 12: <b>cat</b> 4 of 4, class 7 1 of 4"
    assert shown["A small step along the gradient raises the loss far less than predicted"] == "0 of 12"
    assert shown["Images that survive many steps"] == "9 of 12"
    assert shown["100 black-box queries break images that survive many steps"] == "2 of 12: <b>cat</b> 2 of 4"
    assert shown["The same batch repeated three times"] == "1 of 12 labels change, logits by up to 0.25 of their spread"
    assert shown["The same image in another batch"] == "0 of 0 labels change"
    assert shown["Softmax is exactly one-hot in float32"] == "12 of 12; median margin 123"
    assert shown["Logits are not finite"] == "1 of 12 within eps, 2 beyond"
    assert "Images in another scale" not in shown


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"tried": 0}, "30 of 40 correct as given; no other scales tried"),
        ({"tried": 10}, "30 of 40 correct as given; none of 10 other scales is better"),
        (
            {"tried": 10, "best": "the scale", "undone": True, "best_correct": 39, "p_value": 1e-5},
            "30 of 40 correct as given, 39 with the scale undone",
        ),
    ],
)
def test_gain_of_another_scale(changes: dict[str, object], shown: str) -> None:
    probes = make_probes(normalization=NormalizationProbe(n=40, correct=30, **changes))
    assert rows(make_report(Sanity(probes=probes)))["Images in another scale"] == shown


def test_omitted_checks_have_no_row() -> None:
    shown = rows(make_report(Sanity(probes=make_probes(black_box=None))))
    assert not [what for what in shown if "queries" in what]


def test_curves_run_through_the_measurements() -> None:
    losses, broken = probe_curves(make_report(Sanity(probes=make_probes())))
    assert list(losses.plot.names) == ["0", "1", "10"]
    (axes,) = losses.plot.draw(320, 10).axes
    assert axes.lines[0].get_ydata().tolist() == losses.plot.data[0].y
    assert "−2.0 at steps 0, −1.0 at steps 1, +0.5 at steps 10" in losses.alt
    assert (list(broken.plot.names), broken.plot.data[0].y) == (["0.031", "1"], [25.0, 100.0])
    assert "25% at eps 0.031, 100% at eps 1" in broken.alt
    # A loss that was not finite leaves no point.
    steps = [StepProbe(step=step, log_odds=None, margin=None, broken=0) for step in (0, 10)]
    (axes,) = probe_curves(make_report(Sanity(probes=make_probes(steps=steps))))[0].plot.draw(320, 10).axes
    assert np.isnan(axes.lines[0].get_ydata()).all()


def test_the_page_shows_probes_folded_and_escaped() -> None:
    page = report_page(make_report(Sanity(probes=make_probes())))
    assert re.search(r'<details class="probes">\s*<summary>All checks, on 12 images', page)
    assert "5 of 12: &lt;b&gt;cat&lt;/b&gt; 4 of 4, class 7 1 of 4" in page
    assert escape(CLASSES[2]) in page
    assert CLASSES[2] not in page
    assert "1,234 forward and 321 backward passes" in page


def test_the_most_severe_finding_comes_first_and_no_checks_are_shown_without_probes() -> None:
    sanity = Sanity(findings=[Finding(severity=one, text=one) for one in ("info", "error", "warning", "error")])
    report = make_report(sanity)
    page = report_page(report)
    shown = re.findall(r'<li class="(\w+)"><b>(\w+)</b>', page)
    assert shown == [("error", "Error"), ("error", "Error"), ("warning", "Warning"), ("info", "Note")]
    assert (trust_table(report), probe_curves(report)) == (None, [])
    assert "All checks" not in page
