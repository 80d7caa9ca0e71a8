"""A leaderboard merges seeds, compares comparable runs, and writes a site that is safe against malicious names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from classwise.core.errors import InputError
from classwise.reporting import load_report
from classwise.reporting.effort import AttackInfo
from classwise.reporting.leaderboard import find_runs, leaderboard, robustbench, unique_class_names
from classwise.reporting.report import ClassReport, DatasetInfo, ThreatInfo
from classwise.reporting.site import write_site
from classwise.storage.files import write_json
from classwise.storage.verdicts import Verdicts

N = 100


def make_report(
    kept: list[int],
    *,
    method: str | None = "trades",
    seed: int = 0,
    eps: str = "8/255",
    attack: str = "pgd",
    classes: list[str] | None = None,
    **model: Any,
) -> ClassReport:
    k = len(kept)
    label, rank = np.repeat(np.arange(k), N), np.tile(np.arange(N), k)
    predicted = np.where(rank < np.asarray(kept)[label], label, (label + 1) % k)
    verdicts = Verdicts(index=np.arange(k * N), label=label, natural=label.copy(), attacks={attack: predicted})
    trained = {
        "name": f"digits/{method}",
        "model": "small",
        "objective": {"name": method},
        "policy": {"name": "uniform"},
    }
    told = {} if method is None else {"trained": {**trained, "seed": seed}}
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(
            name="birds", split="test", n=k * N, classes=classes or [f"c{i}" for i in range(k)], digest="d"
        ),
        model={"name": "net", **told, **model},
        threat=ThreatInfo(norm="Linf", eps=0.03, eps_text=eps),
        attacks={attack: AttackInfo(spec=f"{attack}:steps=20", settings="", attacked=1, rejected=0, seconds=1.0)},
    )


def test_seeds_are_one_entry_with_their_spread() -> None:
    board = leaderboard([make_report([50, 20, 60], seed=0), make_report([50, 30, 40], seed=1)])
    (entry,) = [one for one in board.entries if one.result == "pgd"]
    assert entry.seeds == [0, 1]
    assert entry.average.value == pytest.approx((130 / 3 + 40) / 2, abs=1e-3)
    assert entry.average.sd == pytest.approx(np.std([130 / 3, 40], ddof=1), abs=1e-3)
    assert (entry.worst.value, entry.worst.sd) == (25.0, pytest.approx(np.std([20, 30], ddof=1), abs=1e-3))
    assert entry.worst_classes == ["c1"]
    assert entry.average.low is None
    assert entry.runs == [0, 1]


def test_runs_that_differ_in_more_than_the_seed_are_separate_entries() -> None:
    one = make_report([50, 20, 60])
    others = [
        make_report([50, 20, 60], method="madry"),
        make_report([50, 20, 60], eps="4/255"),
        make_report([50, 20, 60], attack="fgsm"),
        make_report([50, 20]),
    ]
    assert all(len(entry.runs) == 1 for entry in leaderboard([one, *others]).entries)
    unknown = [make_report([50, 20, 60], method=None) for _ in range(2)]
    assert all(len(entry.runs) == 1 for entry in leaderboard(unknown).entries)


def test_a_single_run_has_its_interval() -> None:
    report = make_report([50, 20, 60])
    (entry,) = [one for one in leaderboard([report]).entries if one.result == "pgd"]
    overall, worst = report["pgd"].overall, report["pgd"].worst
    assert worst is not None
    assert (entry.average.low, entry.average.high, entry.average.sd) == (overall.low, overall.high, None)
    assert (entry.worst.value, entry.worst.low, entry.worst.high) == (worst.value, worst.low, worst.high)


def test_rho_is_against_the_baseline_of_the_same_kind() -> None:
    reports = [make_report([60, 20, 70]), make_report([54, 30, 60], method="wat"), make_report([9, 9, 9], eps="4/255")]
    entries = {(one.method, one.threat): one for one in leaderboard(reports).entries if one.result == "pgd"}
    assert entries["trades", "Linf 8/255"].baseline
    assert entries["trades", "Linf 8/255"].rho is None
    # By hand: the worst class gains 10 of 20; the average loses 2 of 50.
    assert entries["wat", "Linf 8/255"].rho == pytest.approx(10 / 20 - 2 / 50, abs=1e-4)
    other = {one.method: one for one in leaderboard(reports, baseline="wat").entries if one.result == "pgd"}
    assert other["wat"].baseline
    assert all(one.rho is None for one in leaderboard(reports[1:]).entries)


def test_entries_begin_with_the_highest_worst_class() -> None:
    reports = [make_report([60, value, 70], method=f"m{value}") for value in (10, 40, 25)]
    worst = [entry.worst.value for entry in leaderboard(reports).entries]
    assert worst == sorted(worst, reverse=True)


def test_unknown_baseline_method_is_refused() -> None:
    reports = [make_report([60, 20, 70], method="wat"), make_report([60, 40, 70], method="faal")]
    known = sorted({entry.method for entry in leaderboard(reports).entries})
    assert len(known) == 2
    with pytest.raises(InputError) as caught:
        leaderboard(reports, baseline="foo")
    assert str(caught.value) == f"unknown baseline method 'foo' (known: {', '.join(known)})"


def test_cards_have_the_keys_of_robustbench_and_the_classes() -> None:
    plain, full = robustbench([make_report([50, 20, 60]), make_report([50, 20, 60], attack="autoattack")])
    assert (plain["clean_acc"], plain["dataset"], plain["eps"], plain["threat_model"]) == (
        100.0,
        "birds",
        "8/255",
        "Linf",
    )
    assert "autoattack_acc" not in plain
    assert full["autoattack_acc"] == pytest.approx(130 / 3, abs=1e-3)
    assert full["classwise"]["class_acc"] == {"c0": 50.0, "c1": 20.0, "c2": 60.0}
    assert (full["classwise"]["worst_class"], full["classwise"]["worst_class_acc"]) == ("c1", 20.0)


def test_two_classes_of_one_name_keep_their_own_numbers() -> None:
    report = make_report([50, 20, 60, 30], attack="autoattack", classes=["crane", "crane", "owl", "crane"])
    other = make_report([50, 40, 60, 30], attack="autoattack", seed=1, classes=["crane", "crane", "owl", "crane"])
    (card,) = robustbench([report])
    wanted = {"crane": 50.0, "crane (class 1)": 20.0, "owl": 60.0, "crane (class 3)": 30.0}
    assert card["classwise"]["class_acc"] == wanted
    assert card["classwise"]["clean_class_acc"] == dict.fromkeys(wanted, 100.0)
    assert card["classwise"]["worst_class"] == "crane (class 1)"
    (entry,) = [one for one in leaderboard([report, other]).entries if one.result == "autoattack"]
    assert entry.worst_classes == ["crane (class 1)", "crane (class 3)"]


def test_names_that_already_contain_a_class_number() -> None:
    assert unique_class_names(["a", "a", "a (class 1)"]) == ["a", "a (class 1)", "a (class 1) (class 2)"]


def save(report: ClassReport, place: Path) -> None:
    place.mkdir(parents=True)
    report.to_json(place / "report.json")


def test_runs_are_found_below_a_folder_once(tmp_path: Path) -> None:
    for name in ("b/seed-0", "b/seed-1", "a"):
        save(make_report([5, 6]), tmp_path / name)
    names = [str(run.relative_to(tmp_path.resolve())) for run in find_runs([tmp_path, tmp_path / "a"])]
    assert names == ["a", "b/seed-0", "b/seed-1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"contains no report\.json"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(InputError, match="nowhere: no such directory"):
        find_runs([tmp_path / "nowhere"])


def test_the_site_holds_a_page_for_every_run_and_the_numbers(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    save(make_report([50, 20, 60], method=hostile), tmp_path / "in/../in/one")
    save(make_report([50, 30, 60]), tmp_path / "in" / "two")
    runs = find_runs([tmp_path / "in"])
    board = write_site(runs, tmp_path / "out", title=hostile)
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert "&lt;script&gt;alert(1)" in page
    for number in range(2):
        assert f'href="runs/{number:04d}.html"' in page
        assert (tmp_path / f"out/runs/{number:04d}.html").exists()
    assert json.loads((tmp_path / "out/leaderboard.json").read_text()) == board.model_dump(mode="json", by_alias=True)
    assert json.loads((tmp_path / "out/robustbench.json").read_text()) == robustbench(
        [load_report(run) for run in runs]
    )
    assert "://" not in page


def test_invalid_training_record_is_treated_as_unknown(tmp_path: Path) -> None:
    report = make_report([5, 6], method=None, trained="by hand", weights="w/x.safetensors", spec="resnet18")
    save(report, tmp_path / "run")
    entry = leaderboard([load_report(tmp_path / "run")]).entries[0]
    assert (entry.method, entry.model, entry.architecture) == ("–", "x", "resnet18")
    write_json(tmp_path / "run/report.json", {"dataset": {}})
    with pytest.raises(
        InputError, match="is not a classwise report: the key 'schema' is missing; evaluate the model again"
    ):
        load_report(tmp_path / "run")
