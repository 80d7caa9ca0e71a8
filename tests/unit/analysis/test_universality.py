"""Agreement between runs against scipy, hand computation and a known population."""

# N examples, K classes, R runs

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, spearmanr

import classwise as cw
from classwise.analysis import universality
from classwise.analysis.result import table_of
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.reporting.pages import answers_page
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.storage.verdicts import Verdicts

Make = Callable[..., Path]
N = 20
CORRECT = {
    "base-0": [20, 18, 15, 9, 4, 3],
    "base-1": [19, 18, 9, 15, 3, 4],
    "base-2": [18, 19, 12, 12, 5, 1],
    "lenet-0": [12, 20, 10, 11, 2, 6],
    "lenet-1": [11, 14, 13, 9, 7, 1],
    "sgd-0": [1, 4, 9, 12, 18, 20],
}
RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "lenet": {"model": "lenet"},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1}},
    "slow": {"optimizer.lr": 1e-4},
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make(name, correct)``: a run in which ``correct`` examples of each class survive, with the recipe in its
    name.
    """

    def make(
        name: str, correct: Any, *, n: int = N, classes: list[str] | None = None, recipe: dict[str, Any] | None = None
    ) -> Path:
        kept = np.asarray(correct)
        if kept.ndim == 1:  # how many of each class, else which
            kept = np.arange(n) < kept[:, None]
        labels = np.repeat(np.arange(len(kept)), kept.shape[1])
        verdicts = Verdicts.pending(np.arange(len(labels)), labels, ["pgd"])
        verdicts.natural = labels
        verdicts.attacks["pgd"] = np.where(kept.ravel(), labels, (labels + 1) % len(kept))
        report = cw.ClassReport.from_verdicts(
            verdicts,
            dataset=DatasetInfo(
                name="planted", split="test", n=len(labels), classes=classes or [str(k) for k in range(len(kept))]
            ),
            model={"name": name},
            threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
            attacks={},
        )
        place = tmp_path / name.replace("/", "_")
        place.mkdir()
        verdicts.save(place / "verdicts.parquet", "planted")
        report.to_json(place / "report.json")
        setting, _, seed = name.rpartition("-")
        if recipe is not None or setting in RECIPES:
            overrides = RECIPES[setting] if recipe is None else recipe
            asked = load_recipe("digits/madry", {**overrides, "seed": int(seed)}).model_dump()
            (place / "run.json").write_text(json.dumps({"training": {"asked": asked}}), encoding="utf-8")
        return place

    return make


def spearman(one: str, other: str) -> float:
    return float(spearmanr(CORRECT[one], CORRECT[other]).statistic)


def test_agreement_is_the_mean_coefficient_over_pairs_with_different_seeds(make: Make) -> None:
    found = universality(*(make(name, correct) for name, correct in CORRECT.items()))
    names = list(CORRECT)
    assert found.runs == names
    for i, j in combinations(range(len(names)), 2):
        assert found.coefficients[i][j] == pytest.approx(spearman(names[i], names[j]), abs=1e-4)
    base, lenet, sgd = found.settings
    assert [(one.name, one.runs) for one in found.settings] == [
        ("base", names[:3]),
        ("lenet", names[3:5]),
        ("sgd", names[5:]),
    ]
    assert [one.changed for one in found.settings] == [[], ["model"], ["optimizer"]]
    within = [np.mean([spearman(*pair) for pair in combinations(one.runs, 2)]) for one in (base, lenet)]
    assert [base.within.value, lenet.within.value] == pytest.approx(within, abs=1e-4)
    assert (sgd.within.value, sgd.within.low) == (None, None)
    apart = [pair for pair in product(base.runs, lenet.runs) if pair[0][-1] != pair[1][-1]]
    assert len(apart) == 4
    pairs = {(pair.one, pair.other): pair for pair in found.pairs}
    both = pairs["base", "lenet"]
    assert both.agreement.value == pytest.approx(np.mean([spearman(*pair) for pair in apart]), abs=1e-4)
    assert both.ceiling == pytest.approx(math.sqrt(within[0] * within[1]), abs=1e-4)
    assert pairs["base", "sgd"].ceiling is None
    changes = {change.what: change for change in found.changes}
    assert list(changes) == ["model", "optimizer", "several keys"]
    assert changes["model"].lost.value == pytest.approx(both.ceiling - both.agreement.value, abs=1e-3)
    assert changes["optimizer"].lost.value is None
    assert pairs["lenet", "sgd"].changed == ["model", "optimizer"]
    means = 100 * np.mean([CORRECT[run] for run in base.runs], 0) / N
    assert base.by_class == pytest.approx(means.tolist(), abs=1e-4)
    assert (base.weakest, sgd.weakest) == (5, 0)
    assert found.finding.startswith("Under all attacks, class 5 is the weakest in 2 of 3 settings; Spearman")
    for part in [both.agreement, base.within, changes["model"].lost]:
        assert part.low <= part.high
    assert len(found.frame) == len(names) * (len(names) - 1) / 2


def test_equal_seeds_are_paired_without_others(make: Make) -> None:
    found = universality(make("base-0", CORRECT["base-0"]), make("sgd-0", CORRECT["sgd-0"]))
    assert found.pairs[0].agreement.value == pytest.approx(spearman("base-0", "sgd-0"), abs=1e-4)
    assert found.changes[0].ceiling is None
    assert "seeds agree" not in found.finding
    json.dumps(found.to_dict(), allow_nan=False)


def test_changed_keys_within_tables(make: Make) -> None:
    found = universality(make("base-0", CORRECT["base-0"]), make("slow-1", CORRECT["base-1"]))
    assert found.settings[1].changed == ["optimizer.lr"]
    assert found.changes[0].what == "optimizer.lr"


def test_runs_without_recipe_are_separate_settings(make: Make) -> None:
    found = universality(make("one", CORRECT["base-0"]), make("two", CORRECT["base-0"]), make("base-0", [3] * 5 + [1]))
    assert [one.name for one in found.settings] == ["one", "two", "base"]
    assert found.settings[1].changed == ["unknown keys"]
    assert found.pairs[0].agreement.value == 1.0


def test_identical_and_reversed_orders(make: Make) -> None:
    correct = [0, 4, 8, 12, 16, 20]
    runs = [make(f"base-{seed}", correct) for seed in range(3)] + [make("lenet-3", correct[::-1])]
    found = universality(*runs)
    assert found.settings[0].within.value == 1.0
    assert found.pairs[0].agreement.value == -1.0
    assert found.pairs[0].agreement.low == -1.0


def test_equal_classes_have_no_order(make: Make) -> None:
    runs = [make("base-0", [7] * 5), make("base-1", CORRECT["base-1"][:5]), make("lenet-0", CORRECT["lenet-0"][:5])]
    found = universality(*runs)
    assert found.settings[0].within.value is None
    assert found.coefficients[0] == [None, None, None]
    assert found.pairs[0].agreement.value == pytest.approx(
        float(spearmanr(CORRECT["base-1"][:5], CORRECT["lenet-0"][:5]).statistic), abs=1e-4
    )
    assert "–" in table_of("settings", found.frames["settings"]).rows[0]
    assert found.figures()[0].plot.z[0][0] is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_intervals_cover_the_population_coefficient(make: Make) -> None:
    """Classes of examples with normally distributed difficulties, equal for both runs, so the survival rates are
    known.
    """
    random, held, trials = np.random.default_rng(0), 0, 25
    for trial in range(trials):
        means = np.stack([one := random.normal(0, 0.8, 10), one + random.normal(0, 0.4, 10)])
        truth = float(spearmanr(*norm.cdf(means)).statistic)
        difficulty = random.normal(0, 1, (10, 60))
        runs = [
            make(f"{trial}/lenet-{number}", own[:, None] > difficulty, recipe={"ema": 0.1 * (number + 1)})
            for number, own in enumerate(means)
        ]
        part = universality(*runs).pairs[0].agreement
        held += part.low <= truth <= part.high
    assert 0.85 <= held / trials <= 1.0


def test_seed_changes_only_the_intervals(make: Make) -> None:
    runs = [make(name, CORRECT[name]) for name in ("base-0", "base-1", "lenet-0")]
    one, same, other = (universality(*runs, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one != other
    assert one.coefficients == other.coefficients


def test_names_are_escaped(make: Make) -> None:
    names = ["<script>alert(1)</script>", "cat\u202egod", "x" * 300, "a\nb", "{{7*7}}"]
    runs = [make("base-0", CORRECT["base-0"][:5], classes=names), make("lenet-0", [1, 2, 3, 4, 5], classes=names)]
    page = answers_page("universality", "about", {"universality": universality(*runs)})
    assert "<script>alert(1)" not in page
    assert "{{7*7}}" in page


def test_weakest_of_many_classes_are_shown(make: Make) -> None:
    random = np.random.default_rng(1)
    found = universality(*(make(f"base-{seed}", random.integers(0, N, 300)) for seed in range(2)))
    assert len(found.figures()[1].plot.columns) == 20
    assert len(found.settings[0].by_class) == 300


def test_bad_input(make: Make) -> None:
    run = make("base-0", CORRECT["base-0"])
    with pytest.raises(InputError, match="got 1 runs; expected 2 or more"):
        universality(run)
    with pytest.raises(InputError, match="unknown result 'cw'"):
        universality(run, run, attack="cw")
    with pytest.raises(InputError, match="not all evaluated on the same examples"):
        universality(run, make("base-1", CORRECT["base-1"], n=30))
    broken = make("lenet-9", CORRECT["lenet-0"])
    (broken / "run.json").write_text('{"training": {"asked": {"epochs": "many"}}}', encoding="utf-8")
    with pytest.raises(InputError, match=r"lenet-9/run\.json cannot be read: ") as caught:
        universality(run, broken)
    assert "\n" not in str(caught.value)
    few = [make(f"lenet-{seed}", [1, 2, 3]) for seed in range(2)]
    with pytest.raises(InputError, match="examples of 3 classes; agreement needs at least 4"):
        universality(*few)
