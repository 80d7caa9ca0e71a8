from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from statsmodels.stats.proportion import proportion_confint

from classwise.core.errors import InputError
from classwise.metrics.intervals import gap_interval, variance_interval
from classwise.reporting import ClassReport, compare
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.gate import no_findings, no_worse_than, thresholds
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Finding, Sanity
from classwise.storage.verdicts import Verdicts

CLASSES = ["ant", "bee", "fly"]
ALPHA = 0.05


def make_report(
    held: np.ndarray, labels: np.ndarray, first_index: int = 0, classes: list[str] = CLASSES
) -> ClassReport:
    """A report in which ``held`` says which examples survive the attack."""
    verdicts = Verdicts(
        index=first_index + np.arange(len(labels)),
        label=labels,
        natural=labels,
        attacks={"pgd": np.where(held, labels, (labels + 1) % len(classes))},
    )
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="insects", split="test", n=len(labels), classes=classes),
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
    ("demand", "passed", "what", "wanted"),
    [
        ({"min_worst": 40}, True, "worst class ant", "at least 40"),
        ({"min_worst": 40.01}, False, "worst class ant", "at least 40.01"),
        ({"min_average": 60}, True, "average", "at least 60"),
        ({"min_average": 61}, False, "average", "at least 61"),
        ({"min_class": ["bee=70"]}, True, "class bee", "at least 70"),
        ({"min_class": ["bee=70.5"]}, False, "class bee", "at least 70.5"),
        ({"min_class": ["0=40"]}, True, "class ant", "at least 40"),
        ({"min_class": ["0=41"]}, False, "class ant", "at least 41"),
        ({"max_mcd": 30}, True, "MCD", "at most 30"),
        ({"max_mcd": 29.5}, False, "MCD", "at most 29.5"),
        ({"max_cv": 200}, True, "CV", "at most 200"),
        ({"max_cv": 199.9}, False, "CV", "at most 199.9"),
    ],
)
def test_thresholds(report, demand, passed, what, wanted):
    (check,) = thresholds(report, "pgd", **demand)
    assert (check.passed, check.what, check.wanted) == (passed, f"pgd: {what}", wanted)
    assert check.measured == f"{check.value:.2f} [{check.low:.2f}, {check.high:.2f}]"
    assert check.text == f"{check.what}: {check.measured} (required: {wanted})"


def test_intervals_of_what_is_measured(report):
    """Wilson's interval for a class named in advance; other intervals for a selected class or a difference."""
    demands = {"min_worst": 0, "min_average": 0, "min_class": ["fly=0"], "max_mcd": 100, "max_cv": 2500}
    found = [(check.value, check.low, check.high) for check in thresholds(report, "pgd", **demands)]
    corrected = report["pgd"].worst.corrected
    counts = [4, 7, 7], [10, 10, 10]
    by_hand = [
        (40, corrected.low, corrected.high),
        (60, *(100 * bound for bound in proportion_confint(18, 30, method="wilson"))),
        (70, *(100 * bound for bound in proportion_confint(7, 10, method="wilson"))),
        (30, *(100 * bound for bound in gap_interval(*counts))),
        (200, *(1e4 * bound for bound in variance_interval(*counts))),
    ]
    assert np.array(found) == pytest.approx(np.array(by_hand), abs=1e-4)


def test_zero_is_a_threshold_but_none_is_not(report):
    demands = {"min_worst": 0, "min_average": 0, "min_class": ["ant=0"], "max_mcd": 0, "max_cv": 0}
    assert [check.passed for check in thresholds(report, "pgd", **demands)] == [True, True, True, False, False]
    assert thresholds(report, "pgd") == []


@pytest.mark.parametrize(
    ("demand", "end", "step"),
    [
        ("min_worst", "low", -0.01),
        ("min_average", "low", -0.01),
        ("min_class", "low", -0.01),
        ("max_mcd", "high", 0.01),
        ("max_cv", "high", 0.01),
    ],
)
def test_confident_compares_the_bound_of_the_interval(report, demand, end, step):
    def judged(limit: float, *, confident: bool):
        value = [f"bee={limit}"] if demand == "min_class" else limit
        (check,) = thresholds(report, "pgd", **{demand: value}, confident=confident)
        return check

    bound = getattr(judged(0, confident=False), end)
    assert judged(bound + step, confident=True).passed
    assert not judged(bound - step, confident=True).passed
    assert judged(bound - step, confident=False).passed
    assert judged(bound, confident=True).wanted.endswith("with 95% confidence")


def test_confident_is_never_less_strict():
    """If many classes have similar accuracies, the lowest measured share may lie below the interval of the true one."""
    held = np.concatenate([np.arange(50) < count for count in (24, *[25] * 99)])
    report = make_report(held, np.repeat(np.arange(100), 50), classes=[str(label) for label in range(100)])
    worst = report["pgd"].worst
    limit = (worst.value + worst.corrected.low) / 2
    assert worst.value < limit < worst.corrected.low
    for confident in (False, True):
        (check,) = thresholds(report, "pgd", min_worst=limit, confident=confident)
        assert not check.passed


@pytest.mark.parametrize(("shares", "limit"), [([0.5] * 10, 50), ([0.3, *[0.6] * 9], 30), ([0.3, 0.4, 0.5, 0.6], 30)])
def test_a_model_at_the_limit_seldom_passes_with_confidence(shares, limit):
    """The nominal rate is 2.5%; 4% allows for the approximation."""
    classes, n, times = [str(label) for label in range(len(shares))], 60, 120
    labels = np.repeat(np.arange(len(shares)), n)
    rng = np.random.default_rng(11)
    passed = 0
    for _ in range(times):
        drawn = make_report(rng.random(labels.size) < np.repeat(shares, n), labels, classes=classes)
        (check,) = thresholds(drawn, "pgd", min_worst=limit + 0.001, confident=True)
        passed += check.passed
    assert binomtest(passed, times, 0.04, alternative="greater").pvalue > 0.01


def test_after_stopping_early_only_worst_class_and_average_have_an_interval(report):
    bounds = {"label": 0, "value": 40.0, "low": 30.0, "high": 50.0}
    allocation = AllocationInfo(
        asked=10, reached=True, rounds=1, contenders=[0], attacked=[10] * 3, available=[10] * 3, **bounds
    )
    early = report.model_copy(update={"allocation": allocation})
    assert len(thresholds(early, "pgd", min_worst=10, min_average=10, confident=True)) == 2
    for demand in ({"min_class": ["bee=1"]}, {"max_mcd": 99}, {"max_cv": 2000}):
        (check,) = thresholds(early, "pgd", **demand)
        assert (check.passed, check.low, check.high) == (True, None, None)
        with pytest.raises(InputError, match=r"--confident needs an interval, which .* does not have"):
            thresholds(early, "pgd", **demand, confident=True)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ("bea=3", "unknown class 'bea': did you mean 'bee'? expected a name or a label from 0 to 2"),
        ("3=3", "unknown class '3': expected a name or a label from 0 to 2"),
        ("-1=3", "unknown class '-1': expected a name or a label from 0 to 2"),
        ("bee", "a limit for a class must be name=percent, such as cat=30, got 'bee'"),
        ("bee=", "a limit for a class must be name=percent, such as cat=30, got 'bee='"),
        ("bee=many", "a limit for a class must be name=percent, such as cat=30, got 'bee=many'"),
        ("bee=101", "a limit must be a percentage from 0 to 100, got 101.0"),
        ("bee=nan", "a limit must be a percentage from 0 to 100, got nan"),
    ],
)
def test_invalid_class_limits(report, demand, message):
    with pytest.raises(InputError) as caught:
        thresholds(report, "pgd", min_class=[demand])
    assert str(caught.value) == message


def test_a_name_goes_before_a_label_and_may_hold_an_equals_sign():
    held = np.arange(30) % 10 < np.repeat([1, 5, 9], 10)
    odd = make_report(held, np.repeat([0, 1, 2], 10), classes=["2", "a=b", "2x"])
    assert [check.value for check in thresholds(odd, "pgd", min_class=["2=0", "a=b=0"])] == [10, 50]
    assert [check.value for check in thresholds(odd, "pgd", min_class=["1=0"])] == [50]
    with pytest.raises(InputError, match="class 1 is given twice: pass one limit for each class"):
        thresholds(odd, "pgd", min_class=["a=b=5", "1=6"])
    twice = make_report(held, np.repeat([0, 1, 2], 10), classes=["cat", "cat", "dog"])
    with pytest.raises(InputError, match=r"2 classes are named 'cat': use one of the labels \[0, 1\]"):
        thresholds(twice, "pgd", min_class=["cat=3"])
    assert thresholds(twice, "pgd", min_class=["1=3"])[0].value == 50


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ({"max_cv": 2501}, "a limit must be a variance in percent² from 0 to 2500, got 2501"),
        ({"max_mcd": -1}, "a limit must be a percentage from 0 to 100, got -1"),
        ({"min_average": float("inf")}, "a limit must be a percentage from 0 to 100, got inf"),
    ],
)
def test_invalid_limits(report, demand, message):
    with pytest.raises(InputError) as caught:
        thresholds(report, "pgd", **demand)
    assert str(caught.value) == message


def test_thresholds_apply_to_the_result_that_is_named(report):
    (check,) = thresholds(report, "natural", min_worst=100)
    assert check.passed
    with pytest.raises(InputError, match="unknown result 'pdg'"):
        thresholds(report, "pdg", min_worst=1)


def test_unmeasured_results_fail():
    nothing = np.array([], dtype=np.int64)
    empty = make_report(nothing == 1, nothing)
    demands = {"min_worst": 0, "min_average": 0, "min_class": ["ant=0"], "max_mcd": 100, "max_cv": 2500}
    for confident in (False, True):
        checks = thresholds(empty, "pgd", **demands, confident=confident)
        assert [(check.passed, check.measured, check.value) for check in checks] == [(False, "not measured", None)] * 5


LABELS = np.repeat([0, 1, 2], 1000)


def noisy(seed: int, shares: list[float]) -> np.ndarray:
    """Survival with given shares; the difficulty of an example is equal in all models up to small noise."""
    difficulty = np.random.default_rng(0).random(3000)
    blur = np.random.default_rng(seed).normal(0, 0.02, 3000)
    return difficulty + blur < np.repeat(shares, 1000)


def against(baseline: np.ndarray, model: np.ndarray) -> dict[str, bool]:
    comparison = compare(make_report(baseline, LABELS), make_report(model, LABELS), names=["before", "after"])
    checks = no_worse_than(comparison, "worst-case", ALPHA)
    names = ["average", *CLASSES]
    assert all(f" {name}, change" in check.what for name, check in zip(names, checks, strict=True))
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


def rerun(held: np.ndarray, flips: float, rng: np.random.Generator) -> np.ndarray:
    """The same model with another random seed: a few verdicts change, in both directions equally."""
    return held ^ (rng.random(held.size) < flips)


def test_another_seed_of_the_attack_passes():
    held = np.random.default_rng(4).random(3000) < 0.5
    assert all(against(held, rerun(held, 0.01, np.random.default_rng(5))).values())


@pytest.mark.parametrize("flips", [0.01, 0.1])
def test_false_alarms_stay_within_alpha(flips):
    """Holm's method controls the rate over all classes, and the average is one more test; of both, only losses
    count.
    """
    rng, times, alpha = np.random.default_rng(6), 100, 0.2
    alarms = 0
    for _ in range(times):
        # A rate of one half makes gains and losses equally likely, as between two runs of one model.
        held = rng.random(3000) < 0.5
        comparison = compare(make_report(held, LABELS), make_report(rerun(held, flips, rng), LABELS))
        alarms += not all(check.passed for check in no_worse_than(comparison, "pgd", alpha))
    assert binomtest(alarms, times, alpha, alternative="greater").pvalue > 0.01
    assert alarms > 0  # the gate does raise alarms


def test_alpha_is_the_significance_level():
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
    check = ant(ALPHA)
    assert (check.what, check.wanted) == ("pgd: class ant, change", "no loss at alpha = 0.05")
    assert check.measured == f"-0.70 points (p = {p_value:.2g})"
    assert (check.value, check.p_value) == (pytest.approx(-0.7), pytest.approx(p_value))


def test_unpaired_runs_cannot_be_gated():
    held = noisy(1, [0.5, 0.6, 0.4])
    comparison = compare(make_report(held, LABELS), make_report(held, LABELS, first_index=1))
    with pytest.raises(InputError) as caught:
        no_worse_than(comparison, "pgd", ALPHA)
    assert str(caught.value) == ("a paired test needs runs with the same examples: evaluate both on the same data")


def test_results_of_only_one_run_are_refused():
    held = noisy(1, [0.5, 0.6, 0.4])
    comparison = compare(make_report(held, LABELS), make_report(held, LABELS))
    with pytest.raises(InputError, match="the runs have no common result 'fab': choose one of nat"):
        no_worse_than(comparison, "fab", ALPHA)


@pytest.mark.parametrize(
    ("severity", "failures"),
    [("error", ["trained-on-these"]), ("warning", ["trained-on-these", "unreached"]), ("info", None)],
)
def test_findings_fail_at_or_above_a_severity(report, severity, failures):
    found = [
        Finding(severity="info", code="rounded-eps", text="eps is rounded"),
        Finding(severity="warning", code="unreached", text="3 images keep their label"),
        Finding(severity="error", code="trained-on-these", text="seen before"),
    ]
    checks = no_findings(report.model_copy(update={"sanity": Sanity(findings=found)}), severity)
    assert not any(check.passed for check in checks)
    codes = failures or ["trained-on-these", "unreached", "rounded-eps"]
    assert [check.what.split(", ")[1] for check in checks] == codes
    assert (checks[0].what, checks[0].measured) == ("trust finding: error, trained-on-these", "seen before")
    assert checks[0].wanted == f"no finding of severity {severity} or higher"


def test_no_findings_pass_and_skipped_probes_are_stated(report):
    mild = Sanity(findings=[Finding(severity="info", text="all well")])
    (check,) = no_findings(report.model_copy(update={"sanity": mild}), "warning")
    assert (check.passed, check.measured) == (True, "none (trust checks did not run)")
    assert check.wanted == "no finding of severity warning or higher"
    with pytest.raises(InputError, match=r"unknown severity 'warn': did you mean 'warning'\?"):
        no_findings(report, "warn")
