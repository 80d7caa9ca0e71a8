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


def setting(found, name: str) -> dict[str, Any]:
    """The row of a configuration."""
    (row,) = found.frames["configurations"].query("setting == @name").to_dict("records")
    return row


def agreement(found, one: str, other: str) -> tuple[float, float, float]:
    """The agreement of two configurations with its interval, which all pairs of their runs repeat."""
    names = [f"agreement_of_settings{end}" for end in ("", "_low", "_high")]
    pairs = found.frame[["setting", "other_setting"]].apply(set, axis=1) == {one, other}
    (values,) = found.frame[pairs][names].drop_duplicates().to_numpy().tolist()
    return tuple(values)


def test_agreement_is_the_mean_coefficient_over_pairs_with_different_seeds(make: Make) -> None:
    found = universality(*(make(name, correct) for name, correct in CORRECT.items()))
    names = list(CORRECT)
    assert found.about["models"] == names
    pairs = found.frame.set_index(["other_run", "run"])["spearman"]
    for pair in combinations(names, 2):
        assert pairs[pair] == pytest.approx(spearman(*pair), abs=1e-4)
    assert len(found.frame) == len(names) * (len(names) - 1) / 2
    configurations = found.frames["configurations"]
    assert configurations["setting"].tolist() == ["base", "lenet", "sgd"]
    assert configurations["runs"].tolist() == [3, 2, 1]
    assert set(found.frame.query("setting == 'lenet'")["run"]) == set(names[3:5])
    assert configurations["changed"].tolist() == ["–", "model", "optimizer"]
    runs = {"base": names[:3], "lenet": names[3:5]}
    within = [np.mean([spearman(*pair) for pair in combinations(own, 2)]) for own in runs.values()]
    assert configurations["agreement_between_seeds"].tolist() == pytest.approx([*within, np.nan], abs=1e-4, nan_ok=True)
    assert configurations["agreement_between_seeds_low"].isna().tolist() == [False, False, True]
    apart = [pair for pair in product(*runs.values()) if pair[0][-1] != pair[1][-1]]
    assert len(apart) == 4
    both, low, high = agreement(found, "base", "lenet")
    assert both == pytest.approx(np.mean([spearman(*pair) for pair in apart]), abs=1e-4)
    lenet = setting(found, "lenet")
    assert [lenet[f"agreement_with_first{end}"] for end in ("", "_low", "_high")] == [both, low, high]
    assert lenet["ceiling_with_first"] == pytest.approx(math.sqrt(within[0] * within[1]), abs=1e-4)
    assert np.isnan(setting(found, "sgd")["ceiling_with_first"])
    changes = found.frames["changes"].set_index("changed")
    assert list(changes.index) == ["model", "optimizer", "several keys"]
    lost = changes["ceiling_minus_agreement"]
    assert lost["model"] == pytest.approx(lenet["ceiling_with_first"] - both, abs=1e-3)
    assert np.isnan(lost["optimizer"])
    assert changes["agreement"]["several keys"] == agreement(found, "lenet", "sgd")[0]
    means = 100 * np.mean([CORRECT[run] for run in runs["base"]], 0) / N
    assert list(found.figures()[1].plot.z[0]) == pytest.approx(means.tolist(), abs=1e-4)
    assert configurations["weakest_class"].tolist()[::2] == ["5", "0"]
    assert setting(found, "base")["weakest_class_percent"] == pytest.approx(means[5], abs=1e-4)
    assert found.finding.startswith("Under all attacks, class 5 is the weakest in 2 of 3 configurations; Spearman")
    assert low <= high
    assert (
        setting(found, "base")["agreement_between_seeds_low"] <= setting(found, "base")["agreement_between_seeds_high"]
    )
    assert changes["ceiling_minus_agreement_low"]["model"] <= changes["ceiling_minus_agreement_high"]["model"]


def test_equal_seeds_are_paired_without_others(make: Make) -> None:
    found = universality(make("base-0", CORRECT["base-0"]), make("sgd-0", CORRECT["sgd-0"]))
    assert agreement(found, "base", "sgd")[0] == pytest.approx(spearman("base-0", "sgd-0"), abs=1e-4)
    assert found.frames["changes"]["ceiling"].isna().all()
    assert "between seeds" not in found.finding
    json.dumps(found.to_dict(), allow_nan=False)


def test_changed_keys_within_tables(make: Make) -> None:
    found = universality(make("base-0", CORRECT["base-0"]), make("slow-1", CORRECT["base-1"]))
    assert found.frames["configurations"]["changed"].tolist() == ["–", "optimizer.lr"]
    assert found.frames["changes"]["changed"].tolist() == ["optimizer.lr"]


def test_runs_without_recipe_are_separate_configurations(make: Make) -> None:
    found = universality(make("one", CORRECT["base-0"]), make("two", CORRECT["base-0"]), make("base-0", [3] * 5 + [1]))
    assert found.frames["configurations"]["setting"].tolist() == ["one", "two", "base"]
    assert setting(found, "two")["changed"] == "unknown keys"
    assert agreement(found, "one", "two")[0] == 1.0


def test_identical_and_reversed_orders(make: Make) -> None:
    correct = [0, 4, 8, 12, 16, 20]
    runs = [make(f"base-{seed}", correct) for seed in range(3)] + [make("lenet-3", correct[::-1])]
    found = universality(*runs)
    assert setting(found, "base")["agreement_between_seeds"] == 1.0
    assert agreement(found, "base", "lenet")[:2] == (-1.0, -1.0)


def test_equal_classes_have_no_order(make: Make) -> None:
    runs = [make("base-0", [7] * 5), make("base-1", CORRECT["base-1"][:5]), make("lenet-0", CORRECT["lenet-0"][:5])]
    found = universality(*runs)
    assert np.isnan(setting(found, "base")["agreement_between_seeds"])
    assert found.frame.query("other_run == 'base-0'")["spearman"].isna().tolist() == [True, True]
    assert agreement(found, "base", "lenet")[0] == pytest.approx(
        float(spearmanr(CORRECT["base-1"][:5], CORRECT["lenet-0"][:5]).statistic), abs=1e-4
    )
    assert "–" in table_of("configurations", found.frames["configurations"]).rows[0]
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
        (row,) = universality(*runs).frame.to_dict("records")
        held += row["agreement_of_settings_low"] <= truth <= row["agreement_of_settings_high"]
    assert 0.85 <= held / trials <= 1.0


def test_seed_changes_only_the_intervals(make: Make) -> None:
    runs = [make(name, CORRECT[name]) for name in ("base-0", "base-1", "lenet-0")]
    one, same, other = (universality(*runs, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one != other
    assert one.frame["spearman"].equals(other.frame["spearman"])


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
    assert "the 20 weakest classes" in found.figures()[1].title


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
