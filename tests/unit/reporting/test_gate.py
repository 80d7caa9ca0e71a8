from __future__ import annotations

import numpy as np
import pytest

from classwise.errors import InputError
from classwise.reporting import ClassReport, compare
from classwise.reporting.gate import no_findings, no_worse_than, thresholds
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Finding, Sanity
from classwise.verdicts import Verdicts

CLASSES = ["ant", "bee", "fly"]
ALPHA = 0.05


def make_report(held: np.ndarray, labels: np.ndarray, first_index: int = 0) -> ClassReport:
    """A report where ``held`` tells which examples survive the one attack."""
    verdicts = Verdicts(
        index=first_index + np.arange(len(labels)),
        label=labels,
        natural=labels,
        attacks={"pgd": np.where(held, labels, (labels + 1) % 3)},
    )
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="insects", split="test", n=len(labels), classes=CLASSES),
        model={},
        threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
        attacks={},
    )


@pytest.fixture
def report() -> ClassReport:
    """Under attack: ants 40 %, bees 70 %, flies 70 %, on average 60 %."""
    labels = np.repeat([0, 1, 2], 10)
    held = np.tile(np.arange(10), 3) < np.repeat([4, 7, 7], 10)
    return make_report(held, labels)


@pytest.mark.parametrize(
    ("demand", "passed", "text"),
    [
        ({"min_worst": 40}, True, "pgd: worst class ant at 40.00 (wanted ≥ 40)"),
        ({"min_worst": 40.01}, False, "pgd: worst class ant at 40.00 (wanted ≥ 40.01)"),
        ({"min_average": 60}, True, "pgd: average at 60.00 (wanted ≥ 60)"),
        ({"min_average": 61}, False, "pgd: average at 60.00 (wanted ≥ 61)"),
        ({"max_mcd": 30}, True, "pgd: gap between classes at 30.00 (wanted ≤ 30)"),
        ({"max_mcd": 29.5}, False, "pgd: gap between classes at 30.00 (wanted ≤ 29.5)"),
    ],
)
def test_thresholds(report, demand, passed, text):
    (check,) = thresholds(report, "pgd", **demand)
    assert (check.passed, check.text) == (passed, text)


def test_zero_is_a_threshold_and_none_is_not(report):
    assert [check.passed for check in thresholds(report, "pgd", min_worst=0, min_average=0, max_mcd=0)] == [
        True,
        True,
        False,
    ]
    assert thresholds(report, "pgd") == []


def test_thresholds_apply_to_the_result_that_is_named(report):
    (check,) = thresholds(report, "natural", min_worst=100)
    assert check.passed
    with pytest.raises(InputError, match="unknown result 'pdg'"):
        thresholds(report, "pdg", min_worst=1)


def test_what_was_not_measured_fails():
    nothing = np.array([], dtype=np.int64)
    empty = make_report(nothing == 1, nothing)
    checks = thresholds(empty, "pgd", min_worst=0, min_average=0, max_mcd=100)
    assert [check.passed for check in checks] == [False, False, False]
    assert all("could not be measured" in check.text for check in checks)


LABELS = np.repeat([0, 1, 2], 1000)


def noisy(seed: int, shares: list[float]) -> np.ndarray:
    """Survival with given shares, an example's luck being the same in every model but for a little noise."""
    luck = np.random.default_rng(0).random(3000)
    blur = np.random.default_rng(seed).normal(0, 0.02, 3000)
    return luck + blur < np.repeat(shares, 1000)


def against(baseline: np.ndarray, model: np.ndarray) -> dict[str, bool]:
    comparison = compare(make_report(baseline, LABELS), make_report(model, LABELS), names=["before", "after"])
    checks = no_worse_than(comparison, "worst-case", ALPHA)
    names = ["average", *CLASSES]
    assert all(f" {name} " in check.text for name, check in zip(names, checks, strict=True))
    return {name: check.passed for name, check in zip(names, checks, strict=True)}


def test_a_planted_regression_is_caught_in_its_class():
    before = noisy(1, [0.5, 0.6, 0.4])
    after = noisy(2, [0.5, 0.52, 0.4])
    assert after[1000:2000].mean() - before[1000:2000].mean() == pytest.approx(-0.08, abs=0.01)
    assert against(before, after) == {"average": False, "ant": True, "bee": False, "fly": True}


def test_a_regression_hidden_by_gains_elsewhere_is_caught():
    passed = against(noisy(1, [0.5, 0.6, 0.4]), noisy(2, [0.6, 0.52, 0.5]))
    assert passed == {"average": True, "ant": True, "bee": False, "fly": True}


def test_gains_pass():
    assert all(against(noisy(1, [0.5, 0.6, 0.4]), noisy(2, [0.6, 0.7, 0.5])).values())


def test_the_same_model_passes():
    held = noisy(1, [0.5, 0.6, 0.4])
    assert all(against(held, held).values())


def test_no_difference_but_noise_seldom_fails():
    """Holm keeps the rate of false alarms over all classes at alpha; the average is one more test of its own."""
    shares = [0.5, 0.6, 0.4]
    times = 60
    alarms = sum(
        not all(against(noisy(2 * seed + 10, shares), noisy(2 * seed + 11, shares)).values()) for seed in range(times)
    )
    # Both are two-sided and only losses count, so at most 5 % of runs fail; more than 8 of 60 then has p < 0.01.
    assert alarms <= 8


def test_alpha_decides():
    # Eight lost and one gained of one class: p = 2 (1 + 9) / 2^9, three times for three classes.
    before = np.ones(3000, dtype=bool)
    before[0] = False
    after = np.ones(3000, dtype=bool)
    after[1:9] = False
    comparison = compare(make_report(before, LABELS), make_report(after, LABELS))
    p_value = 3 * 2 * 10 / 512

    def ant(alpha: float):
        return no_worse_than(comparison, "pgd", alpha)[1]

    assert ant(p_value + 1e-9).passed is False
    assert ant(p_value - 1e-9).passed is True
    assert ant(ALPHA).text == f"pgd: class ant -0.7 points against the baseline (p = {p_value:.2g})"


def test_unpaired_runs_cannot_be_gated():
    held = noisy(1, [0.5, 0.6, 0.4])
    comparison = compare(make_report(held, LABELS), make_report(held, LABELS, first_index=1))
    with pytest.raises(InputError) as caught:
        no_worse_than(comparison, "pgd", ALPHA)
    assert str(caught.value) == "the two runs were not measured on the same examples: no paired test is possible"


@pytest.mark.parametrize(
    ("severity", "failures"),
    [("error", ["trained-on-these"]), ("warning", ["trained-on-these", "unreached"]), ("info", None)],
)
def test_findings_fail_from_a_severity_up(report, severity, failures):
    found = [
        Finding(severity="info", code="rounded-eps", text="eps is rounded"),
        Finding(severity="warning", code="unreached", text="3 images keep their label"),
        Finding(severity="error", code="trained-on-these", text="seen before"),
    ]
    checks = no_findings(report.model_copy(update={"sanity": Sanity(findings=found)}), severity)
    assert not any(check.passed for check in checks)
    codes = failures or ["trained-on-these", "unreached", "rounded-eps"]
    assert [check.text.split(": ")[1].split(", ")[1] for check in checks] == codes
    assert checks[0].text == "sanity: error, trained-on-these: seen before"


def test_no_findings_pass_and_what_was_not_probed_is_said(report):
    mild = Sanity(findings=[Finding(severity="info", text="all well")])
    (check,) = no_findings(report.model_copy(update={"sanity": mild}), "warning")
    assert (check.passed, check.text) == (
        True,
        "sanity: no finding of severity warning or graver (no probes were made)",
    )
    with pytest.raises(InputError, match=r"unknown severity 'warn': did you mean 'warning'\?"):
        no_findings(report, "warn")
