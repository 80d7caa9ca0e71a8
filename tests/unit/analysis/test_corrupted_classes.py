"""Corruptions against their verdicts and scipy."""

# N examples, K classes

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

import classwise as cw
from classwise.analysis import corruptions
from classwise.core.errors import InputError
from classwise.metrics import wilson
from classwise.reporting.corruptions import CorruptionInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

KINDS = {"gaussian": "noise", "shot": "noise", "snow": "weather"}


@pytest.fixture
def make_corrupted(tmp_path: Path) -> Callable[..., Path]:
    """``make_corrupted(k, n, severities, seed=0, absent=())``: random verdicts, each class easier than the last."""

    def make(
        k: int, n: int, severities: tuple[int, ...] = (1, 3, 5), seed: int = 0, absent: tuple[int, ...] = ()
    ) -> Path:
        random = np.random.default_rng(seed)
        label = np.repeat([own for own in range(k) if own not in absent], n)
        verdicts = Verdicts.pending(
            np.arange(len(label)), label, ["pgd"], corrupted=[f"{kind}-{s}" for kind in KINDS for s in severities]
        )

        def kept(hardness: float) -> np.ndarray:
            ease = np.clip((1 + label) / (k + 1) - hardness, 0, 1)
            return np.where(random.random(len(label)) < ease, label, (label + 1) % k)

        verdicts.natural, verdicts.attacks["pgd"] = kept(-0.4), kept(0.1)
        for kind in KINDS:
            for severity in severities:
                verdicts.corrupted[f"{kind}-{severity}"] = kept(severity / 10 - 0.3)
        report = cw.ClassReport.from_verdicts(
            verdicts,
            dataset=DatasetInfo(
                name="planted", split="test", n=len(label), classes=[f"class {own}" for own in range(k)]
            ),
            model={"name": "model"},
            threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
            attacks={},
            corruptions=[
                CorruptionInfo(key=f"{kind}-{s}", kind=kind, family=family, severity=s)
                for kind, family in KINDS.items()
                for s in severities
            ],
        )
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        verdicts.save(out / "verdicts.parquet", "planted")
        report.to_json(out / "report.json")
        return out

    return make


def family(found, name: str) -> dict:
    """The row of a family."""
    (row,) = found.frames["families"].query("family == @name").to_dict("records")
    return row


def accuracies(found, name: str, severity: int | None = None) -> list[float]:
    """Class accuracies under a family, at one severity or at all."""
    own = found.frame[found.frame["family"] == name]
    rows = own[own["severity"].isna()] if severity is None else own[own["severity"] == severity]
    assert rows["label"].tolist() == list(range(len(rows)))
    return rows["accuracy_percent"].tolist()


def test_means_match_the_verdicts(make_corrupted) -> None:
    run = make_corrupted(k=6, n=37)
    found = corruptions(run, attack="pgd")
    verdicts = cw.load_report(run).verdicts
    assert found.frames["families"]["family"].tolist() == ["natural", "noise", "weather", "pgd"]
    assert found.about["corruptions"] == {"noise": ["gaussian", "shot"], "weather": ["snow"]}
    curves: dict[str, list[float]] = {"noise": [], "weather": []}
    for name, kinds in found.about["corruptions"].items():
        own = found.frame[found.frame["family"] == name]
        assert own["severity"].dropna().unique().tolist() == [1, 3, 5]
        for severity in (1, 3, 5):
            right = np.mean([verdicts.corrupted[f"{kind}-{severity}"] == verdicts.label for kind in kinds], axis=0)
            curves[name].append(100 * right.mean())
            for label, row in enumerate(own[own["severity"] == severity].to_dict("records")):
                share = right[verdicts.label == label]
                assert (row["accuracy_percent"], row["n"]) == (pytest.approx(100 * share.mean(), abs=1e-4), 37)
                low, high = wilson(share.sum(), 37)
                ends = (row["accuracy_percent_low"], row["accuracy_percent_high"])
                assert ends == pytest.approx((100 * low, 100 * high), abs=1e-4)
        shares = accuracies(found, name)
        means = np.mean([accuracies(found, name, severity) for severity in (1, 3, 5)], axis=0)
        assert shares == pytest.approx(means, abs=1e-3)
        row = family(found, name)
        spread = (row["class_variance"], row["max_class_difference_points"])
        assert spread == pytest.approx((np.var(shares), np.ptp(shares)), abs=1e-3)
        assert row["worst_class_percent"] == min(shares)
    noise, _, weather, _ = found.figures()[1].plot.data
    assert list(noise.y) == pytest.approx(curves["noise"], abs=1e-4)
    assert list(weather.y) == pytest.approx(curves["weather"], abs=1e-4)


def test_coefficients_match_scipy(make_corrupted) -> None:
    run = make_corrupted(k=12, n=40)
    found = corruptions(run, attack="pgd")
    robust = [part.value for part in cw.load_report(run)["pgd"].by_class]
    assert accuracies(found, "pgd") == robust
    for name in ("natural", "noise", "weather"):
        row, shares = family(found, name), accuracies(found, name)
        expected = pearsonr(shares, robust)
        low, high = expected.confidence_interval(0.95)
        found_here = [row[f"pearson_with_attack{end}"] for end in ("", "_low", "_high")]
        assert found_here == pytest.approx([expected.statistic, low, high], abs=1e-4)
        assert row["spearman_with_attack"] == pytest.approx(spearmanr(shares, robust).statistic, abs=1e-4)
        assert row["spearman_with_attack_low"] < row["spearman_with_attack"] < row["spearman_with_attack_high"]
    assert family(found, "noise")["pearson_with_attack"] > 0.8  # the easy classes are planted easy throughout
    most = max((family(found, name) for name in ("noise", "weather")), key=lambda row: row["spearman_with_attack"])
    assert f"most under {most['family']}, with Spearman {most['spearman_with_attack']:.2f} [" in found.finding


def test_single_severity_has_no_curve(make_corrupted) -> None:
    several, one = corruptions(make_corrupted(4, 10)), corruptions(make_corrupted(4, 10, severities=(3,)))
    assert (len(several.figures()), several.frame["severity"].nunique()) == (2, 3)
    assert (len(one.figures()), one.frame["severity"].nunique()) == (1, 1)
    heat, curves = several.figures()
    assert list(heat.plot.columns) == ["natural", "noise", "weather", "worst-case"]
    assert [row[1] for row in heat.plot.z] == accuracies(several, "noise")
    assert [drawn.name for drawn in curves.plot.data] == [
        "noise",
        "noise, worst class",
        "weather",
        "weather, worst class",
    ]
    assert list(curves.plot.data[1].y) == [min(accuracies(several, "noise", severity)) for severity in (1, 3, 5)]
    assert list(curves.plot.data[0].x) == [1, 3, 5]


def test_absent_few_and_many_classes(make_corrupted) -> None:
    absent = corruptions(make_corrupted(6, 20, absent=(0, 3)))
    assert np.isnan([accuracies(absent, "noise")[3], accuracies(absent, "noise", 1)[3]]).all()
    assert family(absent, "noise")["pearson_with_attack"] == pytest.approx(
        pearsonr(*(np.delete(accuracies(absent, name), [0, 3]) for name in ("noise", "worst-case"))).statistic, abs=1e-4
    )
    assert family(absent, "worst-case")["worst_class"] == "class 1"
    assert absent.frame.query("label == 0")["accuracy_percent"].isna().tolist() == [True] * 10
    json.dumps(absent.to_dict(), allow_nan=False)

    few = corruptions(make_corrupted(2, 20))
    assert np.isnan(family(few, "noise")["spearman_with_attack"])
    assert "too few classes" in few.finding

    many = corruptions(make_corrupted(1000, 2))
    assert len(many.figures()[0].plot.z) == 1000


def test_real_evaluation(trained: Path, tmp_path: Path) -> None:
    cw.evaluate(
        str(trained), "digits", attacks=["pgd:steps=2", "corruptions:severity=1+5"], eps=0.1, per_class=5, out=tmp_path
    )
    found = corruptions(tmp_path)
    assert list(found.about["corruptions"]) == ["noise", "blur", "weather", "digital"]
    assert sum(map(len, found.about["corruptions"].values())) == 15
    assert set(found.frame["severity"].dropna()) == {1, 5}


def test_bad_input(make_run, make_corrupted) -> None:
    with pytest.raises(InputError, match="evaluated without corruptions: add --attack corruptions"):
        corruptions(make_run("run", [[5, 1], [1, 5]]))
    run = make_corrupted(3, 5)
    with pytest.raises(InputError, match="unknown result 'cw'"):
        corruptions(run, attack="cw")
    report = json.loads((run / "report.json").read_text())
    report["results"] = {"natural": report["results"]["natural"]}
    (run / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match="evaluated without an attack"):
        corruptions(run)
