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
from classwise.analysis.corruptions import _worst
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


def test_means_match_the_verdicts(make_corrupted) -> None:
    run = make_corrupted(k=6, n=37)
    found = corruptions(run, attack="pgd")
    verdicts = cw.load_report(run).verdicts
    assert [one.family for one in found.families] == ["noise", "weather"]
    assert found.families[0].kinds == ["gaussian", "shot"]
    for one in found.families:
        kinds = [kind for kind, family in KINDS.items() if family == one.family]
        assert [part.severity for part in one.severities] == [1, 3, 5]
        for part in one.severities:
            right = np.mean([verdicts.corrupted[f"{kind}-{part.severity}"] == verdicts.label for kind in kinds], axis=0)
            assert part.overall.value == pytest.approx(100 * right.mean(), abs=1e-4)
            for label, own in enumerate(part.by_class):
                share = right[verdicts.label == label]
                assert (own.value, own.n) == (pytest.approx(100 * share.mean(), abs=1e-4), 37)
                low, high = wilson(share.sum(), 37)
                assert (own.low, own.high) == pytest.approx((100 * low, 100 * high), abs=1e-4)
            assert _worst(part.by_class).value == min(own.value for own in part.by_class)
        shares = [own.value for own in one.by_class]
        assert shares == pytest.approx(
            np.mean([[own.value for own in part.by_class] for part in one.severities], axis=0), abs=1e-3
        )
        assert (one.cv, one.mcd) == pytest.approx((np.var(shares), np.ptp(shares)), abs=1e-3)


def test_coefficients_match_scipy(make_corrupted) -> None:
    run = make_corrupted(k=12, n=40)
    found = corruptions(run, attack="pgd")
    robust = [part.value for part in cw.load_report(run)["pgd"].by_class]
    assert [part.value for part in found.adversarial.by_class] == robust
    for one in (found.natural, *found.families):
        shares = [part.value for part in one.by_class]
        expected = pearsonr(shares, robust)
        low, high = expected.confidence_interval(0.95)
        found_here = (one.pearson.value, one.pearson.low, one.pearson.high)
        assert found_here == pytest.approx((expected.statistic, low, high), abs=1e-4)
        assert one.spearman.value == pytest.approx(spearmanr(shares, robust).statistic, abs=1e-4)
        assert one.spearman.low < one.spearman.value < one.spearman.high
    assert found.families[0].pearson.value > 0.8  # the easy classes are planted easy throughout
    assert max(found.families, key=lambda one: one.spearman.value).spearman.with_p in found.finding


def test_single_severity_has_no_curve(make_corrupted) -> None:
    several, one = corruptions(make_corrupted(4, 10)), corruptions(make_corrupted(4, 10, severities=(3,)))
    assert (len(several.figures()), several.frame["severity"].nunique()) == (2, 3)
    assert (len(one.figures()), one.frame["severity"].nunique()) == (1, 1)
    heat, curves = several.figures()
    assert list(heat.plot.columns) == ["natural", "noise", "weather", "worst-case"]
    assert [row[1] for row in heat.plot.z] == [part.value for part in several.families[0].by_class]
    assert [drawn.name for drawn in curves.plot.data] == [
        "noise",
        "noise, worst class",
        "weather",
        "weather, worst class",
    ]
    assert list(curves.plot.data[1].y) == [_worst(part.by_class).value for part in several.families[0].severities]
    assert list(curves.plot.data[0].x) == [1, 3, 5]


def test_absent_few_and_many_classes(make_corrupted) -> None:
    absent = corruptions(make_corrupted(6, 20, absent=(0, 3)))
    assert absent.families[0].by_class[3].value is None
    assert absent.families[0].severities[0].by_class[3].value is None
    assert absent.families[0].pearson.n == 4
    assert _worst(absent.adversarial.by_class).label == 1
    assert absent.frame.query("label == 0")["accuracy_percent"].isna().tolist() == [True] * 10
    json.dumps(absent.to_dict(), allow_nan=False)

    few = corruptions(make_corrupted(2, 20))
    assert few.families[0].spearman.value is None
    assert "too few classes" in few.finding

    many = corruptions(make_corrupted(1000, 2))
    assert len(many.figures()[0].plot.z) == 1000


def test_real_evaluation(trained: Path, tmp_path: Path) -> None:
    cw.evaluate(
        str(trained), "digits", attacks=["pgd:steps=2", "corruptions:severity=1+5"], eps=0.1, per_class=5, out=tmp_path
    )
    found = corruptions(tmp_path)
    assert [one.family for one in found.families] == ["noise", "blur", "weather", "digital"]
    assert {part.severity for one in found.families for part in one.severities} == {1, 5}
    assert sum(len(one.kinds) for one in found.families) == 15


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
