from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from scipy.stats import binomtest

from classwise.core.errors import InputError
from classwise.reporting import ClassReport, load_report
from classwise.reporting.effort import AttackInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Finding, Sanity
from classwise.storage.verdicts import Verdicts

CLASSES = ["airplane", "bird", "cat", "deer"]
PRESENT = [0, 1, 3]  # no example has class cat


def make_verdicts(n: int = 90) -> Verdicts:
    """Three of four classes, and two attacks that break some of the naturally correct examples."""
    rng = np.random.default_rng(5)
    label = np.sort(rng.choice(PRESENT, n, p=[0.5, 0.3, 0.2]))
    natural = np.where(rng.random(n) < 0.85, label, rng.integers(0, 4, n))

    def attacked(share: float) -> np.ndarray:
        broken = (rng.random(n) < share * (1 + label / 3)) & (natural == label)
        return np.where(broken, (label + 1) % 4, natural)

    return Verdicts(
        index=3 * np.arange(n),
        label=label,
        natural=natural,
        attacks={"fgsm": attacked(0.2), "pgd:steps=40": attacked(0.35)},
    )


def make_report(verdicts: Verdicts, classes: list[str] = CLASSES) -> ClassReport:
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="birds", split="test", n=len(verdicts), classes=classes),
        model={"name": "net", "parameters": 12},
        threat=ThreatInfo(norm="Linf", eps=8 / 255, eps_text="8/255"),
        attacks={
            key: AttackInfo(spec=key, settings=f"{key}()", attacked=9, rejected=0, seconds=0.5)
            for key in verdicts.attacks
        },
        sanity=Sanity(findings=[Finding(severity="info", text="All is well.")]),
    )


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return make_verdicts()


@pytest.fixture
def report(verdicts) -> ClassReport:
    return make_report(verdicts)


@pytest.fixture
def written(report, tmp_path) -> dict:
    report.to_json(tmp_path / "report.json")
    return json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


RESULTS = ["natural", "fgsm", "pgd:steps=40", "worst-case"]


def test_file_has_the_shape_of_the_contract(written):
    assert written.keys() == {
        "schema",
        "dataset",
        "model",
        "threat",
        "attacks",
        "allocation",
        "results",
        "confusion",
        "corruptions",
        "sanity",
        "command",
    }
    assert written["schema"] == "classwise/report/1"
    assert written["dataset"] == {
        "name": "birds",
        "split": "test",
        "n": 90,
        "classes": CLASSES,
        "digest": None,
        "superclasses": {},
    }
    assert written["model"] == {"name": "net", "parameters": 12}
    assert written["threat"] == {"norm": "Linf", "eps": 8 / 255, "eps_text": "8/255"}
    assert written["sanity"] == {
        "findings": [{"severity": "info", "code": "remark", "text": "All is well.", "labels": []}],
        "probes": None,
    }
    assert list(written["attacks"]) == ["fgsm", "pgd:steps=40"]
    assert list(written["results"]) == list(written["confusion"]) == RESULTS
    for result in written["results"].values():
        assert result.keys() == {"overall", "by_class", "worst", "cv", "mcd"}
        assert result["overall"].keys() == {"value", "low", "high", "n"}
        assert [part.keys() for part in result["by_class"]] == [{"label", "class", "value", "low", "high", "n"}] * 4
        assert [part["label"] for part in result["by_class"]] == [0, 1, 2, 3]
        assert [part["class"] for part in result["by_class"]] == CLASSES
        assert result["worst"].keys() == {"label", "class", "value", "low", "high", "n", "corrected"}
        assert result["worst"]["corrected"].keys() == {"value", "low", "high"}


def recomputed_predictions(verdicts: Verdicts, key: str) -> np.ndarray:
    if key == "natural":
        return verdicts.natural
    if key != "worst-case":
        return verdicts.attacks[key]
    answers = np.stack([verdicts.natural, *verdicts.attacks.values()])
    first_wrong = (answers != verdicts.label).argmax(axis=0)  # 0 (natural) if no example is broken
    return answers[first_wrong, np.arange(len(verdicts))]


def check_estimate(part: dict, correct: int, n: int) -> None:
    interval = binomtest(correct, n).proportion_ci(method="wilson")
    assert part["n"] == n
    # Files keep four decimals of a percentage.
    assert part["value"] == pytest.approx(100 * correct / n, abs=5.1e-5)
    assert part["low"] == pytest.approx(100 * interval.low, abs=5.1e-5)
    assert part["high"] == pytest.approx(100 * interval.high, abs=5.1e-5)


@pytest.mark.parametrize("key", RESULTS)
def test_numbers_follow_from_the_verdicts(written, verdicts, key):
    result, predictions = written["results"][key], recomputed_predictions(verdicts, key)
    right = predictions == verdicts.label
    check_estimate(result["overall"], int(right.sum()), 90)
    shares = {}
    for label in PRESENT:
        rows = verdicts.label == label
        check_estimate(result["by_class"][label], int(right[rows].sum()), int(rows.sum()))
        shares[label] = 100 * right[rows].mean()
    worst = min(shares, key=shares.get)
    assert (result["worst"]["label"], result["worst"]["class"]) == (worst, CLASSES[worst])
    for name in ("value", "low", "high", "n"):
        assert result["worst"][name] == result["by_class"][worst][name]
    corrected = result["worst"]["corrected"]
    assert result["worst"]["value"] <= corrected["value"] <= corrected["high"]
    # Both come from shares with four decimals and are rounded to four themselves.
    gap = max(shares.values()) - min(shares.values())
    assert result["mcd"] == pytest.approx(gap, abs=3 * 5.1e-5)
    assert result["cv"] == pytest.approx(statistics.pvariance(shares.values()), abs=(2 * gap + 1) * 5.1e-5)

    confusion = np.zeros((4, 4), dtype=int)
    np.add.at(confusion, (verdicts.label, predictions), 1)
    assert written["confusion"][key] == confusion.tolist()


def test_absent_class_is_null_not_zero(written):
    for result in written["results"].values():
        assert result["by_class"][2] == {"label": 2, "class": "cat", "value": None, "low": None, "high": None, "n": 0}
        assert result["worst"]["class"] != "cat"


def test_report_on_nothing():
    nothing = np.array([], dtype=np.int64)
    report = make_report(Verdicts(index=nothing, label=nothing, natural=nothing))
    assert list(report.results) == ["natural"]
    assert report.strongest == "natural"
    assert report.worst is None
    assert (report["natural"].cv, report["natural"].mcd, report["natural"].overall.value) == (None, None, None)


def test_results_are_looked_up_by_name(report):
    assert report.strongest == "worst-case"
    assert report.worst == report["worst-case"].worst
    with pytest.raises(InputError, match="unknown result 'fgms': did you mean 'fgsm'"):
        report["fgms"]
    with pytest.raises(InputError, match=r"unknown result 0 \(known: fgsm, natural, pgd:steps=40, worst-case\)"):
        report[0]


def test_round_trip_with_the_verdicts_beside_it(report, verdicts, tmp_path):
    report.to_json(tmp_path / "report.json")
    from_file = load_report(tmp_path / "report.json")
    assert from_file == load_report(str(tmp_path)) == ClassReport.model_validate(report.model_dump(by_alias=True))
    assert from_file.results == report.results
    assert from_file.verdicts is None

    verdicts.save(tmp_path / "verdicts.parquet", "f00d")
    loaded = load_report(tmp_path).verdicts
    assert loaded.keys == verdicts.keys
    assert loaded.natural.tolist() == verdicts.natural.tolist()


def refused(path) -> str:
    with pytest.raises(InputError) as caught:
        load_report(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_report(tmp_path):
    assert refused(tmp_path / "no") == f"no such run directory: {tmp_path / 'no'}"
    assert refused(tmp_path) == f"{tmp_path} contains no report.json: evaluate the model first"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "is not readable JSON"),
        (lambda text: "", "is not readable JSON"),
        (lambda text: "[]", "is not a classwise report"),
        (lambda text: text.replace("classwise/report/1", "classwise/report/9"), "schema"),
        (lambda text: text.replace('"threat"', '"thread"'), "the key 'threat' is missing"),
        (lambda text: text.replace('"split": "test"', '"split": 7'), "dataset.split"),
        (lambda text: text.replace('"cv": ', '"cv": "much", "was": '), "results.natural.cv"),
    ],
    ids=["torn", "empty", "list", "schema", "missing", "type", "nested"],
)
def test_damaged_report(report, tmp_path, damage, complaint):
    path = tmp_path / "report.json"
    report.to_json(path)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    message = refused(tmp_path)
    assert str(path) in message
    assert complaint in message
    assert message.endswith("; evaluate the model again")


def test_binary_report_and_damaged_verdicts(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(b"\xff\xfe\x00PAR1")
    assert "is not readable JSON" in refused(tmp_path)

    report.to_json(path)
    (tmp_path / "verdicts.parquet").write_bytes(b"PAR1")
    assert refused(tmp_path).endswith("verdicts.parquet is damaged or not a parquet file; evaluate the model again")


def test_verdicts_of_other_examples(report, verdicts, tmp_path):
    report.to_json(tmp_path / "report.json")
    table, n = tmp_path / "verdicts.parquet", report.dataset.n
    verdicts.take(np.arange(n - 1)).save(table, "f00d")
    wanted = f"{table} has {n - 1} rows but report.json has {n} examples: evaluate the model again"
    assert refused(tmp_path) == wanted
