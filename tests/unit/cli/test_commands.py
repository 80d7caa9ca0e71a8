"""The commands as a user runs them: output, files, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app
from classwise.data import DATASETS
from classwise.reporting import load_report
from classwise.reporting.sanity import Finding, Sanity


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small trainings with their evaluations."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("standard", "madry"):
        settings = {"epochs": 4, "attack": {"steps": 3}}
        cw.train(f"digits/{name}", out=root / name, **settings)
        cw.evaluate(str(root / name), "digits", attacks=["pgd:steps=5"], eps="0.1", out=root / name)
    return root


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_training_without_validation_keeps_the_last_epoch(tmp_path: Path) -> None:
    settings = ["-o", "epochs=1", "-o", "validation_per_class=0", "-o", "select=last"]
    code, out, _ = invoke("train", "digits/standard", *settings, "--out", tmp_path / "run")
    assert code == 0
    assert "kept epoch 1, the last: the recipe holds out no validation images" in out
    code, out, _ = invoke("train", "digits/standard", *settings, "--out", tmp_path / "other", "--json")
    assert (code, json.loads(out)["validation"]["robust"]) == (0, None)


def test_training_reports_why_it_stopped_early(tmp_path: Path) -> None:
    settings = ["-o", "epochs=40", "-o", "patience=1", "-o", "optimizer.lr=1e-9", "-o", "attack.steps=1"]
    code, out, _ = invoke("train", "digits/madry", *settings, "--out", tmp_path / "run")
    assert code == 0
    assert " of 40 epochs: no improvement (patience = 1)" in out


def test_train_then_evaluate_then_compare_then_check(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["-o", "epochs=3", "-o", "attack.steps=2", "-o", "policy.eta=0.1"]
    code, out, _ = invoke("train", "digits/wat", *overrides, "--out", run)
    assert code == 0
    assert "best epoch" in out
    assert f"next: classwise evaluate --model {run} --data digits --eps 0.2 --out {run}" in out

    code, out, _ = invoke("evaluate", "--model", run, "--data", "digits", "--eps", "0.2", "--out", run)
    assert code == 0
    assert "digits/test, 697 images, Linf eps = 0.2" in out
    assert f"page: {run / 'report.html'}" in out
    report = load_report(run)
    assert f"{report['pgd'].overall.value:.1f}" in out

    code, out, _ = invoke("compare", run, run, "--out", tmp_path / "c.html")
    assert code == 0
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    code, out, _ = invoke("check", run, "--min-worst", "0")
    assert (code, out.rstrip().endswith("ok")) == (0, True)
    written = {path.name for path in run.iterdir()}
    expected = {"run.json", "metrics.jsonl", "checkpoints", "verdicts.parquet", "report.json", "report.html"}
    assert expected <= written


def test_json_output_equals_the_files(runs: Path, tmp_path: Path) -> None:
    arguments = ["--model", runs / "madry", "--data", "digits", "--attack", "fgsm", "--eps", "0.1", "--per-class", 3]
    code, out, _ = invoke("evaluate", *arguments, "--out", tmp_path / "e", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "e" / "report.json").read_text())
    code, out, _ = invoke("compare", runs / "standard", runs / "madry", "--json")
    answer = json.loads(out)
    assert answer["models"] == ["standard", "madry"]
    assert answer["paired"] is True
    code, out, _ = invoke("train", "digits/standard", "-o", "epochs=1", "--out", tmp_path / "t", "--json")
    assert json.loads(out)["best_epoch"] == 1


def test_check_exit_codes(runs: Path) -> None:
    worst = load_report(runs / "madry").worst.value
    assert invoke("check", runs / "madry", "--min-worst", worst)[0] == 0
    code, out, _ = invoke("check", runs / "madry", "--min-worst", worst + 0.1, "--min-average", "0")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines()] == ["verdict", "FAILED", "ok"]
    assert invoke("check", runs / "madry", "--max-mcd", "0")[0] == 1
    assert invoke("check", runs / "madry", "--no-worse-than", runs / "madry")[0] == 0
    assert invoke("check", runs / "standard", "--no-worse-than", runs / "madry")[0] == 1
    code, out, _ = invoke("check", runs / "standard", "--no-worse-than", runs / "madry", "--json")
    assert (code, json.loads(out)["passed"]) == (1, False)


def test_check_fails_on_findings(runs: Path, tmp_path: Path) -> None:
    report = load_report(runs / "madry")
    findings = [
        Finding(severity="warning", code="zero-gradient", text="At 9 of 40 images"),
        Finding(severity="info", text="well"),
    ]
    report.model_copy(update={"sanity": Sanity(findings=findings)}).to_json(tmp_path / "report.json")
    assert invoke("check", tmp_path, "--fail-on", "error")[0] == 0
    code, out, _ = invoke("check", tmp_path, "--fail-on", "warning", "--min-average", "0")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines()] == ["verdict", "ok", "FAILED"]
    assert re.search("trust finding: warning, zero-gradient +At 9 of 40 images +no finding", out)
    code, out, _ = invoke("check", tmp_path, "--fail-on", "info", "--json")
    assert code == 1
    assert [check["passed"] for check in json.loads(out)["checks"]] == [False, False]


@pytest.mark.parametrize("kind", ["attacks", "methods", "models", "datasets", "recipes", "analyses", "studies"])
def test_list_names_everything_registered(kind: str) -> None:
    code, out, _ = invoke("list", kind)
    assert code == 0
    code, answer, _ = invoke("list", kind, "--json")
    names = json.loads(answer)
    assert len(names) >= (1 if kind == "studies" else 3)
    assert all(name in out for name in names)


def test_list_shows_image_sizes_only_if_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = invoke("list", "datasets")
    lines = {line.split()[0]: line for line in out.splitlines() if "without" in line}
    assert set(lines) == set(DATASETS)
    assert [name for name, line in lines.items() if "resize" in line or "crop" in line] == ["imagenet"]


def test_analyze_and_study(tmp_path: Path) -> None:
    study = tmp_path / "small.toml"
    study.write_text(
        'about = "One run."\n[runs.one]\nrecipe = "digits/standard"\noverrides = { epochs = 1 }\n'
        'evaluate = { attacks = ["pgd:steps=1"], per_class = 5 }\n[[analyses]]\nkind = "confusion"\nruns = ["one"]\n'
    )
    code, out, _ = invoke("study", study, "--out", tmp_path / "study")
    assert code == 0
    assert f"page: {tmp_path / 'study' / 'analyses.html'}" in out
    run = tmp_path / "study" / "runs" / "one"
    code, out, _ = invoke("analyze", "confusion", run, "--out", tmp_path / "out", "-o", "attack=pgd")
    assert code == 0
    assert "Most confused classes under pgd:" in out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "confusion.json",
        "confusion.parquet",
        "confusion-summary.parquet",
        "confusion.tex",
        "confusion.html",
    }
    code, out, _ = invoke("analyze", "confusion", run, "--json")
    assert (code, json.loads(out)["model"]) == (0, "one")
    for arguments, line in (
        (["confussion", run], "did you mean 'confusion'"),
        (["confusion", run, run], "must be 1, got 2"),
        (["confusion", tmp_path / "nowhere"], "no such run directory"),
        (["confusion", run, "-o", "run=x"], "unknown setting of confusion: 'run'"),
        (["confusion", run, "-o", "attack=square"], "unknown result 'square'"),
        (["weight-norms", run, "--out", study], "is a file"),
        (["bound", run, "-o", "gamma=wide"], "gamma"),
    ):
        code, _, err = invoke("analyze", *arguments)
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert line in err
    code, _, err = invoke("study", study, "--out", tmp_path / "study")
    assert (code, "--resume" in err) == (2, True)
    code, _, err = invoke("study", study, "--out", tmp_path / "other", "--engine", "ray")
    assert (code, "not available yet" in err) == (2, True)


def test_help_of_every_command() -> None:
    for command in ("demo", "evaluate", "train", "study", "compare", "analyze", "check", "list"):
        code, out, _ = invoke(command, "--help")
        assert code == 0
        assert "Usage" in out


BAD: list[tuple[list[str], str]] = [
    (["evaluate", "--model", "resnet81", "--data", "digits"], "unknown model 'resnet81': did you mean 'resnet18'?"),
    (["evaluate", "--model", "{run}", "--data", "digit"], "unknown data set 'digit': did you mean 'digits'?"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--attack", "pdg"], "did you mean 'pgd'?"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--attack", "pgd:stepz=3"], "did you mean 'steps'?"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--eps", "0"], "eps must be a positive number, got 0"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--eps=-0.1"], "eps must be a positive number, got -0.1"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--eps", "8"], "did you mean 8/255?"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--eps", "x"], "eps = 'x' is not a number"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--norm", "L1"], "unknown norm 'L1'"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--per-class", "0"], "per_class must be at least 1"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--split", "tset"], "did you mean 'test'?"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--batch-size", "0"], "batch_size must be at least 1"),
    (
        ["evaluate", "--model", "{run}", "--data", "digits", "--device", "tpu9"],
        "unknown device 'tpu9'",
    ),
    (["evaluate", "--model", "{tmp}/none", "--data", "digits"], "none"),
    (["evaluate", "--model", "{tmp}/none.py:net", "--data", "digits"], "none.py"),
    (["evaluate", "--model", "{run}", "--data", "folder:{tmp}/none"], "none"),
    (["evaluate", "--model", "digits-cnn", "--data", "digits"], "weights"),
    (["evaluate", "--model", "digits-cnn", "--data", "digits", "--weights", "{tmp}/no.safetensors"], "no.safetensors"),
    (["evaluate", "--model", "digits-cnn", "--data", "digits", "--weights", "{torn}"], "torn.safetensors"),
    (["evaluate", "--model", "small-cnn", "--data", "digits", "--weights", "{weights}"], "missing"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--seed", "-1"], "seed must be at least 0, got -1"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--seed", str(2**63)], f"seed must be below {2**63}, got"),
    (["evaluate", "--model", "{run}", "--data", "digits", "--attack", "pgd:"], "no settings after ':' in 'pgd:'"),
    (["train", "digits/wat", "--workers", "2"], "--workers applies only to --seeds"),
    (["train", "digits/wat", "--seeds", "3,1,1"], "seed 1 is given twice in --seeds 3,1,1"),
    (["train", "digits/watt"], "unknown recipe 'digits/watt': did you mean 'digits/wat'?"),
    (["train", "{tmp}/none.toml"], "no such recipe file"),
    (["train", "digits/wat", "-o", "epoch=3"], "unknown key 'epoch': did you mean 'epochs'?"),
    (["train", "digits/wat", "-o", "epochs=many"], "epochs = 'many': must be an integer"),
    (["train", "digits/wat", "-o", "seed"], "expected key=value"),
    (["train", "digits/wat", "-o", "device=cpu"], "unknown key 'device'"),
    (["train", "digits/wat", "-o", "out=here"], "unknown key 'out'"),
    (["train", "digits/wat", "--device", "meta"], "device 'meta' is not available: "),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(runs: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    weights = runs / "standard" / "checkpoints" / "best.safetensors"
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(weights.read_bytes()[:-100])
    places = {"run": runs / "standard", "tmp": tmp_path, "torn": torn, "weights": weights}
    filled = [argument.format(**places) for argument in arguments]
    code, out, err = invoke(*filled, "--out", tmp_path / "out")
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "{tmp}/none", "{run}"], "no such run directory"),
        (["compare", "{run}"], "comparing needs at least two reports, got 1"),
        (["compare", "{tmp}", "{run}"], "contains no report.json: evaluate the model first"),
        (["check", "{run}"], "nothing to check"),
        (["check", "{run}", "--no-worse-than", "{run}", "--alpha", "5"], "alpha must be between 0 and 1, got 5"),
        (["check", "{run}", "--min-worst", "1", "--alpha", "2"], "alpha must be between 0 and 1, got 2"),
        (["check", "{run}", "--min-class", "3=5", "--min-class", "3=6"], "class 3 is given twice"),
        (["check", "{run}", "--min-worst", "nan"], "a limit must be a percentage from 0 to 100, got nan"),
        (["check", "{run}", "--fail-on", "warn"], "unknown severity 'warn': did you mean 'warning'?"),
        (["compare", "{run}", "{run}", "--out", "{tmp}"], "is a directory: --out expects a file"),
        (["check", "{tmp}", "--min-worst", "1"], "contains no report.json"),
        (["check", "{run}", "--min-worst", "1", "--attack", "pgdd"], "unknown result 'pgdd': did you mean 'pgd'?"),
    ],
)
def test_bad_reports_are_one_line_and_exit_2(runs: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, err = invoke(*[argument.format(tmp=tmp_path, run=runs / "madry") for argument in arguments])
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert message in err


def test_directory_of_another_run_is_refused(runs: Path, tmp_path: Path) -> None:
    code, _, err = invoke("train", "digits/madry", "-o", "epochs=4", "--out", runs / "standard")
    assert (code, "holds another training" in err) == (2, True)
    (tmp_path / "thesis.txt").write_text("mine")
    code, _, err = invoke("train", "digits/madry", "-o", "epochs=1", "--out", tmp_path)
    assert (code, "is not empty and holds no run (thesis.txt)" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_demo_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short trainings the page names every model, and a second run reuses all results."""
    from classwise.config.recipes import Recipe, load_recipe

    def short(recipe: str, overrides: dict[str, object] | None = None) -> Recipe:
        return load_recipe(recipe, {**(overrides or {}), "epochs": 2})

    monkeypatch.setattr("classwise.api.train.load_recipe", short)
    code, out, _ = invoke("demo", "--out", tmp_path / "demo")
    assert code == 0
    page = tmp_path / "demo" / "index.html"
    assert f"page: {page.resolve()}" in out
    text = page.read_text()
    for name in ("TRADES", "standard", "Madry", "WAT"):
        assert name in text
    assert "rho" in text
    state = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("last.pt")}
    assert len(state) == 4
    assert invoke("demo", "--out", tmp_path / "demo")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("last.pt")} == state


def test_version() -> None:
    assert invoke("--version") == (0, f"classwise {cw.__version__}\n", "")


def test_terminal_without_unicode_shows_the_result(runs: Path) -> None:
    command = [sys.executable, "-m", "classwise", "check", str(runs / "madry"), "--min-worst", "0"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (ended.returncode, ended.stdout.rstrip().endswith("ok")) == (0, True), ended.stderr


def test_radius_of_the_attack_is_used(runs: Path, tmp_path: Path) -> None:
    arguments = ["--model", runs / "madry", "--data", "digits", "--per-class", 2, "--attack", "pgd:eps=0.1,norm=L2"]
    code, out, _ = invoke("evaluate", *arguments, "--out", tmp_path / "out")
    assert code == 0
    assert "L2 eps = 0.1" in out


def test_several_seeds(tmp_path: Path) -> None:
    quick = ["-o", "epochs=1", "--out", tmp_path / "runs"]
    code, out, _ = invoke("train", "digits/standard", "--seeds", "3,1", *quick)
    assert code == 0
    assert out.count("best epoch 1 of 1") == 2
    for seed in (3, 1):
        assert f"--model {tmp_path / 'runs' / f'seed-{seed}'} " in out
        contents = json.loads((tmp_path / "runs" / f"seed-{seed}" / "run.json").read_text(encoding="utf-8"))
        assert contents["training"]["asked"]["seed"] == seed
    code, out, _ = invoke("train", "digits/standard", "--seeds", "3,1", *quick, "--resume", "--json")
    assert code == 0
    assert [Path(answer["directory"]).name for answer in json.loads(out)] == ["seed-3", "seed-1"]
    code, out, _ = invoke("train", "digits/standard", "--seeds", "5,4", "--workers", 2, *quick)
    assert code == 0
    assert out.count("best epoch 1 of 1") == 2
    code, _, err = invoke("train", "digits/standard", "--seeds", "7,8", "--workers", 0, *quick)
    assert (code, err) == (2, "error: workers must be at least 1, got 0\n")
    code, _, err = invoke("train", "digits/standard", "--seeds", "7,8", "--workers", 2, "--processes", 2, *quick)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: workers and processes are mutually exclusive: ")
    code, _, err = invoke("train", "digits/standard", "--seeds", "1,two", *quick)
    assert code == 2
    assert err == "error: seeds must be whole numbers joined by commas, e.g. 0,1,2; got '1,two'\n"


def test_fast_evaluation_prints_its_audit(runs: Path, tmp_path: Path) -> None:
    attack = ["--model", runs / "madry", "--data", "digits", "--eps", "0.1", "--attack", "fast:steps=5,queries=40"]
    code, out, _ = invoke("evaluate", *attack, "--per-class", 20, "--out", tmp_path / "fast")
    assert code == 0
    assert "near-misses" in out
    assert "smallest margins" in out
    audit = load_report(tmp_path / "fast").attacks["fast"].audit
    assert audit is not None
    assert f"Audit: of {audit.left:,} examples that survive the cascade" in out
    code, out, _ = invoke("evaluate", *attack, "--per-class", 5, "--exhaustive", "--out", tmp_path / "all")
    assert code == 0
    assert "Audit:" not in out
    assert "ensemble-square" in out


def test_evaluation_stops_at_the_requested_interval(runs: Path, tmp_path: Path) -> None:
    arguments = ["--model", runs / "madry", "--data", "digits", "--eps", "0.1", "--attack", "fgsm"]
    code, out, _ = invoke("evaluate", *arguments, "--until-worst-ci", 14, "--out", tmp_path / "soon")
    assert code == 0
    assert "Target: 95% interval of the worst class within ±14.0 points" in out
    code, _, err = invoke("evaluate", *arguments, "--until-worst-ci", 0, "--out", tmp_path / "never")
    assert code == 2
    assert err == "error: until_worst_ci must be above 0 and below 50 percentage points, got 0.0\n"


def test_unknown_engine_is_one_line(runs: Path, tmp_path: Path) -> None:
    arguments = ["--model", runs / "madry", "--data", "digits", "--engine", "warp", "--out", tmp_path / "out"]
    code, _, err = invoke("evaluate", *arguments)
    assert code == 2
    assert "engine" in err
    assert "compiled" in err
    assert err.count("\n") == 1
