"""Studies: read, conducted, taken up again, and refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from classwise.analysis import QUESTIONS
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.studies import load_study, study_names
from classwise.studies.conduct import conduct

SMALL = """
about = "Two runs <b>and</b> a question each."
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
def test_every_study_asks_what_there_is_of_recipes_there_are(name: str) -> None:
    study = load_study(name)
    for asked in study.analyses:
        least, most = QUESTIONS[asked.kind].takes
        assert least <= len(asked.runs) <= (most or len(asked.runs))
    for run in study.trainings.values():
        load_recipe(run.recipe, run.overrides)


def test_the_study_of_analyses_asks_everything() -> None:
    assert {asked.kind for asked in load_study("analyses-digits").analyses} == set(QUESTIONS)


def test_a_study_is_conducted_and_taken_up_again(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    found = conduct(load_study(file), tmp_path / "out", name="small")
    assert list(found.answers) == ["confusion, one", "trade-off, one, other"]
    page = found.page.read_text()
    assert "Two runs &lt;b&gt;and&lt;/b&gt; a question each." in page
    for answer in found.answers.values():
        assert answer.sentences()[0][:30] in page
    written = json.loads((tmp_path / "out" / "analyses" / "confusion-one.json").read_text())
    assert written["model"] == "one"
    assert [(tmp_path / "out" / "runs" / run / "margins.parquet").exists() for run in ("one", "other")] == [True, False]
    weights = tmp_path / "out" / "runs" / "one" / "checkpoints" / "best.safetensors"
    before = weights.stat().st_mtime_ns
    with pytest.raises(InputError, match="--resume"):
        conduct(load_study(file), tmp_path / "out", name="small")
    assert conduct(load_study(file), tmp_path / "out", name="small", resume=True).answers == found.answers
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('kind = "confusion"', 'kind = "confussion"'), "did you mean 'confusion'"),
        (('runs = ["one"]', 'runs = ["two"]'), "unknown run"),
        (('"digits/standard"', '"digits/standrad"'), "digits/standard"),
        (('about = "Two', 'abuot = "Two'), "about"),
        (('about = "', "about = "), "no TOML"),
    ],
)
def test_bad_studies_start_nothing(change: tuple[str, str], line: str, tmp_path: Path) -> None:
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


def test_runs_have_much_in_common_and_seeds_of_their_own(tmp_path: Path) -> None:
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
    assert one.answers == two.answers
    assert [setting["runs"] for setting in one.answers["universality, adam, sgd"].model_dump()["settings"]] == [
        ["adam-0", "adam-3"],
        ["sgd-1"],
    ]
    written = sorted(path.name for path in (tmp_path / "one" / "analyses").glob("*.json"))
    attacks = [json.loads((tmp_path / "one" / "analyses" / name).read_text())["attack"] for name in written]
    assert sorted(attacks) == ["natural", "worst-case"]  # the second answer did not take the place of the first


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('recipe = "digits/standard"', ""), "run 'adam' of the study names no recipe"),
        (("seeds = [1]", 'seeds = ["one"]'), "runs.sgd.seeds"),
        (("seeds = [1]", "seeds = []"), "runs.sgd.seeds"),
        (("seeds = [0, 3]", "seed = 0"), "common.seed"),
    ],
)
def test_runs_without_recipe_or_seeds(change: tuple[str, str], line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(SEEDS.replace(*change, 1))
    with pytest.raises(InputError, match=line):
        load_study(file)


def test_two_runs_of_one_name(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    file.write_text(SEEDS.replace("seeds = [0, 3]", "").replace("[runs.adam]", "[runs.sgd-1]"))
    with pytest.raises(InputError, match="two runs are called 'sgd-1'"):
        load_study(file)


def test_workers_are_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers = 0: expected at least 1"):
        conduct(load_study("analyses-digits"), tmp_path / "out", name="none", workers=0)
    assert not (tmp_path / "out").exists()


def test_no_such_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'analyses-digits'"):
        load_study("analysis-digits")
    with pytest.raises(InputError, match="cannot be read"):
        load_study(tmp_path / "nowhere.toml")
