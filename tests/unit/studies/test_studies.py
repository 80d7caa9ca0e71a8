"""Studies: loading, running, resuming, and input errors before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from classwise.analysis import ANALYSES
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.studies import load_study, study_names
from classwise.studies.conduct import conduct

SMALL = """
about = "Two runs <b>and</b> an analysis each."
[runs.one]
recipe = "digits/standard"
overrides = { epochs = 1 }
evaluate = { attacks = ["pgd:steps=1"], per_class = 5, margins = true }
[runs.other]
recipe = "digits/madry"
overrides = { epochs = 1, "attack.steps" = 1 }
evaluate = { attacks = ["pgd:steps=1"], per_class = 5, eps = "0.1" }
[[analyses]]
kind = "confusion"
runs = ["one"]
[[analyses]]
kind = "trade-off"
runs = ["one", "other"]
"""


@pytest.mark.parametrize("name", study_names())
def test_built_in_studies_are_valid(name: str) -> None:
    study = load_study(name)
    for request in study.analyses:
        analysis = ANALYSES[request.kind]
        assert analysis.least <= len(request.runs) <= (analysis.most or len(request.runs))
    for run in study.trainings.values():
        load_recipe(run.recipe, run.overrides)


def test_analyses_digits_runs_every_analysis() -> None:
    assert {request.kind for request in load_study("analyses-digits").analyses} == set(ANALYSES)


def test_running_and_resuming_a_study(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    found = conduct(load_study(file), tmp_path / "out", name="small")
    assert list(found.results) == ["confusion, one", "trade-off, one, other"]
    page = found.page.read_text()
    assert "Two runs &lt;b&gt;and&lt;/b&gt; an analysis each." in page
    for result in found.results.values():
        assert result.finding[:30] in page
    written = json.loads((tmp_path / "out" / "analyses" / "confusion-one.json").read_text())
    assert written["model"] == "one"
    assert [(tmp_path / "out" / "runs" / run / "margins.parquet").exists() for run in ("one", "other")] == [True, False]
    weights = tmp_path / "out" / "runs" / "one" / "checkpoints" / "best.safetensors"
    before = weights.stat().st_mtime_ns
    with pytest.raises(InputError, match="--resume"):
        conduct(load_study(file), tmp_path / "out", name="small")
    assert conduct(load_study(file), tmp_path / "out", name="small", resume=True).results == found.results
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('kind = "confusion"', 'kind = "confussion"'), "did you mean 'confusion'"),
        (('runs = ["one"]', 'runs = ["two"]'), "unknown run"),
        (('"digits/standard"', '"digits/standrad"'), "digits/standard"),
        (('about = "Two', 'abuot = "Two'), "about"),
        (('about = "', "about = "), "not valid TOML"),
    ],
)
def test_invalid_studies_start_nothing(change: tuple[str, str], line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(SMALL.replace(*change, 1))
    with pytest.raises(InputError, match=line):
        conduct(load_study(file), tmp_path / "out", name="bad")
    assert not (tmp_path / "out").exists()


SEEDS = """
about = "One setting twice, and another."
[common]
recipe = "digits/standard"
overrides = { epochs = 1, batch_size = 64 }
seeds = [0, 3]
evaluate = { attacks = ["pgd:steps=1"], per_class = 5 }
[runs.adam]
[runs.sgd]
overrides = { optimizer = "sgd:lr=0.05" }
seeds = [1]
[[analyses]]
kind = "universality"
runs = ["adam", "sgd"]
[[analyses]]
kind = "universality"
runs = ["adam", "sgd"]
settings = { attack = "natural" }
"""


def test_common_settings_and_seeds(tmp_path: Path) -> None:
    file = tmp_path / "seeds.toml"
    file.write_text(SEEDS)
    study = load_study(file)
    trainings = study.trainings
    assert list(trainings) == ["adam-0", "adam-3", "sgd-1"]
    assert trainings["adam-3"].overrides == {"epochs": 1, "batch_size": 64, "seed": 3}
    assert trainings["sgd-1"].overrides == {"epochs": 1, "batch_size": 64, "optimizer": "sgd:lr=0.05", "seed": 1}
    assert trainings["sgd-1"].evaluate.per_class == 5
    one = conduct(study, tmp_path / "one", name="seeds")
    two = conduct(study, tmp_path / "two", name="seeds", workers=2)
    assert one.results == two.results
    agreement = one.results["universality, adam, sgd"]
    assert agreement.frames["configurations"]["runs"].tolist() == [2, 1]
    assert agreement.frame.query("setting == other_setting")[["other_run", "run"]].values.tolist() == [
        ["adam-0", "adam-3"]
    ]
    written = sorted(path.name for path in (tmp_path / "one" / "analyses").glob("*.json"))
    attacks = [json.loads((tmp_path / "one" / "analyses" / name).read_text())["attack"] for name in written]
    assert sorted(attacks) == ["natural", "worst-case"]  # the second result did not overwrite the first


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('recipe = "digits/standard"', ""), "run 'adam' of the study has no recipe"),
        (("seeds = [1]", 'seeds = ["one"]'), "runs.sgd.seeds"),
        (("seeds = [1]", "seeds = []"), "runs.sgd.seeds"),
        (("seeds = [0, 3]", "seed = 0"), "common.seed"),
    ],
)
def test_invalid_recipes_and_seeds(change: tuple[str, str], line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(SEEDS.replace(*change, 1))
    with pytest.raises(InputError, match=line):
        load_study(file)


def test_duplicate_run_names(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    file.write_text(SEEDS.replace("seeds = [0, 3]", "").replace("[runs.adam]", "[runs.sgd-1]"))
    with pytest.raises(InputError, match="two runs are called 'sgd-1'"):
        load_study(file)


def test_workers_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers = 0: expected at least 1"):
        conduct(load_study("analyses-digits"), tmp_path / "out", name="none", workers=0)
    assert not (tmp_path / "out").exists()


def test_unknown_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'analyses-digits'"):
        load_study("analysis-digits")
    with pytest.raises(InputError, match="cannot be read"):
        load_study(tmp_path / "nowhere.toml")
