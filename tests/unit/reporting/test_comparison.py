from __future__ import annotations

import numpy as np
import pytest

from classwise.core.errors import InputError
from classwise.reporting import ClassReport, compare
from classwise.reporting.effort import AttackInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

CLASSES = ["ant", "bee"]
LABELS = [0] * 10 + [1] * 5


def make_report(
    survivors: list[int],
    *,
    natural: list[int] | None = None,
    labels: list[int] = LABELS,
    index: list[int] | None = None,
    attack: str | None = "pgd",
    name: str | None = "net",
    dataset: str = "insects",
    split: str = "test",
    classes: list[str] = CLASSES,
    eps: str = "8/255",
    norm: str = "Linf",
    drop_verdicts: bool = False,
) -> ClassReport:
    """A report from 0/1 lists of the examples that are correct, naturally (default: all) and under attack."""
    label = np.array(labels)
    verdicts = Verdicts(
        index=np.arange(len(label)) if index is None else np.array(index),
        label=label,
        natural=label ^ (1 - np.array(natural or [1] * len(labels))),
        attacks={} if attack is None else {attack: label ^ (1 - np.array(survivors))},
    )
    report = ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name=dataset, split=split, n=len(label), classes=classes),
        model={} if name is None else {"name": name},
        threat=ThreatInfo(norm=norm, eps=0.03, eps_text=eps),
        attacks={},
    )
    return ClassReport.model_validate(report.model_dump(by_alias=True)) if drop_verdicts else report


# Ants, 4 of 10 held; then bees, 4 of 5.
BASELINE = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, *(1, 1, 1, 1, 0)]
# Ants, 7 of 10: five gained, two lost; then bees, 3 of 5: none gained, one lost.
METHOD = [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, *(1, 1, 1, 0, 0)]


def test_by_hand():
    comparison = compare(make_report(BASELINE), make_report(METHOD), names=["trades", "wat"])
    assert comparison.models == ["trades", "wat"]
    assert comparison.paired
    assert list(comparison.results) == ["natural", "pgd", "worst-case"]
    assert comparison.strongest == "worst-case"

    first, second = comparison["pgd"]
    assert (first.overall.value, second.overall.value) == pytest.approx((100 * 8 / 15, 100 * 10 / 15), abs=1e-4)
    assert (first.worst.name, first.worst.value) == ("ant", 40)
    assert (second.worst.name, second.worst.value) == ("bee", 60)
    assert (first.shares, second.shares) == ([40, 80], [70, 60])
    assert (first.cv, second.cv) == (400, 25)
    assert (first.mcd, second.mcd) == (40, 10)

    # The worst class gains a half of 40, the average gains a quarter of 8/15.
    assert first.rho is None
    assert second.rho == pytest.approx(0.5 + 0.25, abs=1e-4)
    assert comparison.rho == second.rho

    assert first.change is None
    assert first.changes == []
    assert (second.change.gained, second.change.lost, second.change.n) == (5, 3, 15)
    assert second.change.points == pytest.approx(100 * 2 / 15, abs=1e-4)
    # Two-sided: 2 (1 + 8 + 28 + 56) / 2^8.
    assert second.change.p_value == pytest.approx(2 * 93 / 256)

    ant, bee = second.changes
    assert (ant.label, ant.name, ant.gained, ant.lost, ant.n, ant.points) == (0, "ant", 5, 2, 10, 30)
    assert (bee.label, bee.name, bee.gained, bee.lost, bee.n, bee.points) == (1, "bee", 0, 1, 5, -20)
    # 2 (1 + 7 + 21) / 2^7, twice for the two classes; one discordant pair tells nothing.
    assert ant.p_value == pytest.approx(2 * 2 * 29 / 128)
    assert bee.p_value == 1

    untouched = comparison["natural"][1]
    assert (untouched.rho, untouched.change.gained, untouched.change.lost, untouched.change.p_value) == (0, 0, 0, 1)


def test_table_is_plain_rows():
    comparison = compare(make_report(BASELINE), make_report(METHOD), names=["trades", "wat"])
    assert comparison.table("pgd")[1] == {
        "model": "wat",
        "average": pytest.approx(100 * 10 / 15, abs=1e-4),
        "worst": 60,
        "worst class": "bee",
        "cv": 25,
        "mcd": 10,
        "rho": pytest.approx(0.75, abs=1e-4),
    }
    assert comparison.table() == comparison.table("worst-case")
    with pytest.raises(InputError, match="unknown result 'pdg': did you mean 'pgd'"):
        comparison.table("pdg")


def test_every_model_is_compared_with_the_first():
    same, worse = make_report(BASELINE), make_report([0] * 15)
    comparison = compare(make_report(BASELINE), same, worse, names=["a", "b", "c"])
    a, b, c = comparison["pgd"]
    assert (a.rho, b.rho, c.rho) == (None, 0, -2)
    assert (b.change.lost, c.change.lost) == (0, 8)
    assert comparison.rho == -2


def test_rho_is_undefined_if_the_worst_class_of_the_baseline_is_zero():
    comparison = compare(make_report([1] * 10 + [0] * 5), make_report(METHOD), names=["a", "b"])
    assert comparison["pgd"][1].rho is None
    assert comparison["natural"][1].rho == 0


def test_only_common_results_are_compared():
    comparison = compare(make_report(BASELINE, attack="fgsm"), make_report(METHOD, attack="pgd"), names=["a", "b"])
    assert list(comparison.results) == ["natural", "worst-case"]
    comparison = compare(make_report(BASELINE, attack=None), make_report(METHOD), names=["a", "b"])
    assert list(comparison.results) == ["natural"]
    assert comparison.strongest == "natural"


@pytest.mark.parametrize(
    ("different", "complaint"),
    [
        ({"dataset": "birds"}, "data: birds/test, baseline: insects/test"),
        ({"split": "train"}, "data: insects/train, baseline: insects/test"),
        ({"eps": "0.031"}, "threat: Linf 0.031, baseline: Linf 8/255"),
        ({"norm": "L2"}, "threat: L2 8/255, baseline: Linf 8/255"),
        ({"classes": ["ant", "fly"]}, "classes: ant, fly, baseline: ant, bee"),
        ({"classes": ["ant", "bee", "fly"]}, "classes: ant, bee, fly, baseline: ant, bee"),
    ],
    ids=["data", "split", "eps", "norm", "classes", "more classes"],
)
def test_incomparable_runs_are_refused(different, complaint):
    with pytest.raises(InputError) as caught:
        compare(make_report(BASELINE), make_report(METHOD, **different), names=["base", "other"])
    message = str(caught.value)
    assert message.startswith("cannot compare 'other' with the baseline: ")
    assert message.endswith(complaint)
    assert "\n" not in message


@pytest.mark.parametrize(
    "other",
    [
        {"index": [*range(14), 99]},
        {"labels": [1, *LABELS[1:]]},
        {"drop_verdicts": True},
    ],
    ids=["other examples", "other labels", "no verdicts"],
)
def test_not_paired_on_different_examples(other):
    comparison = compare(make_report(BASELINE), make_report(METHOD, **other), names=["a", "b"])
    assert not comparison.paired
    row = comparison["pgd"][1]
    assert row.change is None
    assert row.changes == []
    assert row.rho is not None


def test_fewer_examples_are_not_paired():
    comparison = compare(make_report(BASELINE), make_report(METHOD[5:], labels=LABELS[5:]), names=["a", "b"])
    assert not comparison.paired


def test_comparison_requires_two_runs():
    with pytest.raises(InputError, match="at least two reports, got 1"):
        compare(make_report(BASELINE))
    with pytest.raises(InputError, match="expected 2 names, one per report, got 1"):
        compare(make_report(BASELINE), make_report(METHOD), names=["a"])


def test_names_of_reports_are_made_unique():
    reports = [make_report(BASELINE, name=name) for name in ("net", "other", "net", None, "net", "net (2)")]
    models = compare(*reports).models
    assert models == ["net", "other", "net (2)", "model", "net (3)", "net (2) (2)"]


def test_runs_are_named_by_their_directories(tmp_path):
    for folder in ("trades", "wat"):
        report = make_report(BASELINE)
        report.to_json(tmp_path / folder / "report.json")
        report.verdicts.save(tmp_path / folder / "verdicts.parquet", "")
    comparison = compare(tmp_path / "trades", str(tmp_path / "wat" / "report.json"))
    assert comparison.models == ["trades", "wat"]
    assert comparison.paired


def test_directories_of_equal_name_get_different_names(tmp_path):
    for folder in ("a", "b"):
        make_report(BASELINE).to_json(tmp_path / folder / "run" / "report.json")
    models = compare(tmp_path / "a" / "run", tmp_path / "b" / "run").models
    assert len(set(models)) == 2
    assert all("run" in model for model in models)


def test_results_of_different_attacks_are_not_compared():
    """The same key for another attack is an error; a worst case over other attacks is left out."""
    one, two = make_report(BASELINE), make_report(METHOD)
    info = AttackInfo(spec="pgd", settings="PGD(steps=20)", attacked=1, rejected=0, seconds=0.0)
    other = info.model_copy(update={"settings": "PGD(steps=100)"})
    with pytest.raises(InputError, match=r"attack pgd: PGD\(steps=100\), baseline: PGD\(steps=20\)"):
        compare(one.model_copy(update={"attacks": {"pgd": info}}), two.model_copy(update={"attacks": {"pgd": other}}))
    more = two.model_copy(update={"attacks": {"pgd": info, "fgsm": info}})
    assert list(compare(one.model_copy(update={"attacks": {"pgd": info}}), more).results) == ["natural", "pgd"]
