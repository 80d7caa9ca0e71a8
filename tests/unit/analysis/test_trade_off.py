"""Trade-off: the Pareto front by hand, and sweeps of one class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import classwise as cw
from classwise.analysis import trade_off
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError

EVEN = [[7, 3], [3, 7]]
GREEDY = [[10, 0], [5, 5]]
WORSE = [[7, 3], [5, 5]]


def test_pareto_front_by_hand(make_run) -> None:
    runs = [make_run(name, counts) for name, counts in (("even", EVEN), ("greedy", GREEDY), ("worse", WORSE))]
    found = trade_off(*runs)
    columns = ["model", "average_percent", "worst_class_percent", "pareto_front"]
    assert found.frames["models"][columns].to_numpy().tolist() == [
        ["even", 70.0, 70.0, True],
        ["greedy", 75.0, 50.0, True],
        ["worse", 60.0, 50.0, False],
    ]
    assert found.finding.startswith("even has the highest worst class under all attacks: 70.0% [")
    assert len(found.figures()) == 1


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "run"
    cw.train("digits/trades", out=out, epochs=6, attack={"steps": 3})
    cw.evaluate(str(out), "digits", attacks=["pgd:steps=5"], eps=0.1, per_class=20, out=out)
    return out


def test_weight_sweep_changes_one_class(swept: Path) -> None:
    found = trade_off(swept, label=3, values=(0.0, 1.0, 8.0))
    assert found.frames["models"]["value"].tolist() == [1.0, 0.0, 1.0, 8.0]
    assert found.about["turned"] == "weight of class 3"
    own, without, same, heavy = found.frame.query("label == 3")["accuracy_percent"]
    assert without == 0.0  # a class with weight 0 is not learned
    assert heavy > without
    assert same == own  # a weight of 1 is the run itself
    line = json.loads((swept / "trade-off" / "weight-3-8" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["controls"]["weight_adv"][3] == pytest.approx(8 / 1.7)
    assert line["controls"]["weight_adv"][0] == pytest.approx(1 / 1.7)
    assert len(found.figures()) == 2
    assert len(found.frame) == 40


def test_beta_sweep(swept: Path) -> None:
    found = trade_off(swept, turn="beta", label=8, values=(6.0,))
    assert found.frames["models"]["value"].tolist() == [6.0, 6.0]
    own, same = (part["accuracy_percent"].tolist() for _, part in found.frame.groupby("model", sort=False))
    assert same == own  # TRADES' own beta


def test_bad_input(swept: Path, make_run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a class"):
        trade_off(swept, label="cat")
    with pytest.raises(InputError, match="is not a class"):
        trade_off(swept, label=10)
    with pytest.raises(InputError, match="at least one"):
        trade_off(swept, values=())
    with pytest.raises(InputError, match="not the directory of a training"):
        trade_off(make_run("run", EVEN))
    with pytest.raises(InputError, match="needs one run"):
        trade_off()
    cw.train("digits/wat", out=tmp_path / "wat", epochs=1, attack={"steps": 1})
    cw.evaluate(str(tmp_path / "wat"), "digits", attacks=["pgd:steps=1"], eps=0.1, per_class=2, out=tmp_path / "wat")
    with pytest.raises(InputError, match="needs a run with the uniform policy"):
        trade_off(tmp_path / "wat")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"epocks": 3}, "'epocks': extra inputs are not permitted"),
        ({"line\nbreak": 3}, "'line\\nbreak': extra inputs"),
        ({"epochs": "many"}, "'epochs': must be an integer"),
        ({"data": {"name": 3}}, "'data.name': must be a string"),
        ({"objective": []}, "'objective': "),
        ({"eps": {}}, "'eps': "),
    ],
    ids=str,
)
def test_damaged_recipe_is_reported_in_one_line(make_run, damage: dict[str, object], said: str) -> None:
    run = make_run("run", EVEN)
    asked = {**load_recipe("digits/trades").model_dump(mode="json"), **damage}
    (run / "run.json").write_text(json.dumps({"training": {"asked": asked}}))
    with pytest.raises(InputError) as caught:
        trade_off(run)
    assert str(caught.value).startswith(f"the recipe in {run / 'run.json'} cannot be read: {said}")
    assert "\n" not in str(caught.value)


def test_recipe_of_the_wrong_type(make_run) -> None:
    run = make_run("run", EVEN)
    (run / "run.json").write_text('{"training": {"asked": "digits/trades"}}')
    with pytest.raises(InputError, match=r"run\.json cannot be read: 'asked': must be"):
        trade_off(run)
