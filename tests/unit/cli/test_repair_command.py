"""``classwise repair`` and trainings that end with one: output, files, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app
from classwise.data import load_data, to_float
from classwise.models.load import load_model
from classwise.repairs.methods import METHODS
from classwise.reporting.repair import load_repair

EPS = "0.03"
QUICK = ["--per-class", 10, "--targets", 1, "--attack", "fgsm", "--test-per-class", 4, "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickly trained model with the margins of its 120 validation images."""
    out = tmp_path_factory.mktemp("runs") / "standard"
    cw.train("digits/standard", out=out, epochs=3, eps=EPS, validation_per_class=12)
    cw.evaluate(out, "digits", attacks=["fgsm"], eps=EPS, per_class=2, margins=True, out=out)
    return out


@pytest.fixture(scope="module")
def fixed(run: Path) -> Path:
    out = run.parent / "fixed"
    code, _, _ = invoke("repair", run, "--data", "digits", "--rule", "worst", *QUICK, "--out", out)
    assert code == 0
    return out


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def error(*arguments: object) -> str:
    """The one line on standard error that a command ends with, exit code 2."""
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_repair_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "fixed"
    code, printed, _ = invoke("repair", run, "--data", "digits", "--rule", "worst", *QUICK, "--out", out)
    assert code == 0
    report = load_repair(out)
    for sentence in report.sentences():
        assert sentence in printed
    assert "Expected and measured accuracy" in printed
    assert "Classes before and after" in printed
    assert "Frontier" not in printed.splitlines()[0]
    assert f"page: {out / 'repair.html'}" in printed
    assert f"next: classwise compare {out / 'original'} {out}" in printed
    assert report.choice == "rule worst"
    assert report.test is not None
    assert (report.test.attack, report.test.average_after.n) == ("fgsm", 40)
    written = {path.name for path in out.iterdir()}
    assert written >= {
        "run.json",
        "repair.json",
        "repair.html",
        "checkpoints",
        "validation-margins.parquet",
        "original",
    }


def test_json_output_equals_the_file(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "fixed"
    code, printed, _ = invoke("repair", run, "--data", "digits", *QUICK, "--no-evaluate", "--out", out, "--json")
    assert code == 0
    assert json.loads(printed) == json.loads((out / "repair.json").read_text())
    assert json.loads(printed)["test"] is None
    assert not (out / "report.json").exists()


def test_floor(run: Path, tmp_path: Path) -> None:
    arguments = ["repair", run, "--data", "digits", "--device", "cpu", "--no-evaluate"]
    start = load_report_of_start(run, tmp_path / "start")
    floor = start + 2
    code, printed, _ = invoke(*arguments, "--floor", floor, "--out", tmp_path / "fixed")
    assert code == 0
    assert f"floor {floor:g}% (smoothed and cross-validated: " in printed
    assert f"next: classwise evaluate --model {tmp_path / 'fixed'} --data digits --attack fast --eps {EPS}" in printed
    assert load_repair(tmp_path / "fixed").weight
    code, printed, _ = invoke(*arguments, "--floor", 1, "--out", tmp_path / "kept")
    assert code == 0
    assert "smoothed, already reaches the floor: the model is unchanged" in printed
    assert load_repair(tmp_path / "kept").biases == [0.0] * 10


def load_report_of_start(run: Path, out: Path) -> float:
    """The smoothed worst class accuracy of the original model, in percent."""
    found = cw.repair(run, "digits", evaluate=False, out=out)
    return float(int(found.report.frontier[0].worst))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "digits", "--split", "test"], "split 'test' is reserved for the test evaluation"),
        (["--data", "digits", "--floor", "0"], "the floor is a percentage from 1 to below 100, got 0"),
        (["--data", "digits", "--floor", "120"], "the floor is a percentage from 1 to below 100, got 120"),
        (
            ["--data", "digits", "--floor", "99.9"],
            "a floor of 99.9% is not reachable by class biases: the highest worst class is",
        ),
        (["--data", "digits", "--rule", "wurst"], "did you mean 'worst'"),
        (["--data", "digits", "--method", "baias"], "did you mean 'bias'"),
        (["--data", "digits", "--method", "head-sam:rho=x"], "rho"),
        (["--data", "digits", "--targets", "0"], "targets must be between 1 and 9, got 0"),
        (["--data", "digits", "--per-class", "3"], "at least 10 fitting images of each class, got per_class = 3"),
        (["--data", "digits", "--attack", "pgdd"], "did you mean 'pgd'"),
        (["--data", "digits", "--eps", "8"], "did you mean 8/255"),
        (["--data", "digitz"], "did you mean 'digits'"),
        (["--data", "digits", "--weights", "gone.pt"], "no such file"),
    ],
)
def test_bad_input_is_one_line(run: Path, tmp_path: Path, words: list[str], message: str) -> None:
    line = error("repair", run, *words, "--device", "cpu", "--out", tmp_path / "out")
    assert message in line
    assert not (tmp_path / "out" / "repair.json").exists()


def test_unrepairable_models_are_refused(run: Path, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out", "--device", "cpu"]
    assert "no such run directory" in error("repair", "runs/gone", "--data", "digits", "--split", "train", *out)
    assert "without weights" in error("repair", "digits-cnn", "--data", "digits", "--split", "train", *out)
    weights = ["--weights", run / "checkpoints" / "best.safetensors"]
    assert "is not a run directory, so it has" in error("repair", "digits-cnn", "--data", "digits", *weights, *out)
    assert "'runs/gone': no such run directory" in error("repair", "runs/gone", "--data", "digits", *out)
    assert "did you mean 'digits-cnn'" in error("repair", "digits-cn", "--data", "digits", *out)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom classwise.models import DigitsCNN\n"
        "def make():\n    return torch.nn.Sequential(DigitsCNN(), torch.nn.Softmax(1))\n"
    )
    message = error("repair", f"{tmp_path}/mine.py:make", "--data", "digits", "--split", "train", *out)
    assert "returns probabilities, not logits" in message


def test_used_directory_is_refused_without_resume(run: Path, fixed: Path) -> None:
    arguments = ["repair", run, "--data", "digits", *QUICK, "--out", fixed]
    assert "already holds this repair: add --resume" in error(*arguments, "--rule", "worst")
    assert "holds another repair" in error(*arguments, "--rule", "tenth")
    before = (fixed / "checkpoints" / "best.safetensors").read_bytes()
    code, _, _ = invoke(*arguments, "--rule", "worst", "--resume")
    assert code == 0
    assert (fixed / "checkpoints" / "best.safetensors").read_bytes() == before


def test_missing_options() -> None:
    code, _, err = invoke("repair", "somewhere", "--data", "digits")
    assert code == 2
    assert "--out" in err


def test_repairs_are_listed() -> None:
    code, printed, _ = invoke("list", "repairs")
    assert code == 0
    for name, method in METHODS.items():
        assert name in printed
        assert method.about in printed
    code, printed, _ = invoke("list", "repairs", "--json")
    assert (code, json.loads(printed)) == (0, list(METHODS))


def test_commands_after_a_repair(run: Path, fixed: Path, tmp_path: Path) -> None:
    """The commands that the documentation names work on its directory."""
    code, printed, _ = invoke("compare", fixed / "original", fixed, "--json")
    assert code == 0
    assert json.loads(printed)["paired"] is True
    code, _, _ = invoke("export", fixed, "--to", tmp_path / "exported")
    assert code == 0
    x = to_float(load_data("digits", split="test").images[:3])
    with torch.no_grad():
        assert torch.equal(load_model(f"hf:{tmp_path / 'exported'}")(x), load_model(str(fixed))(x))
    arguments = ["--data", "digits", "--attack", "fgsm", "--eps", EPS, "--per-class", 3, "--out", tmp_path / "e"]
    code, printed, _ = invoke("evaluate", "--model", fixed, *arguments)
    assert code == 0
    assert cw.load_report(tmp_path / "e").model["trained"]["repaired"]["name"] == "bias"


# -- trainings that end with a repair ---------------------------------------------------------------------

SHORT = ["-o", "epochs=3", "-o", "eps=0.01", "-o", "validation_per_class=10", "--device", "cpu"]


def test_training_with_a_repair(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed, _ = invoke("train", "digits/standard", *SHORT, "-o", "repair.floor=1", "--out", out)
    assert code == 0
    for sentence in load_repair(out / "repaired").sentences():
        assert sentence in printed
    assert "Fitted on 100 images of digits/train (validation images of the run), floor 1%" in printed
    assert f"next: classwise evaluate --model {out / 'repaired'} --data digits" in printed
    x = to_float(load_data("digits", split="test").images[:3])
    with torch.no_grad():
        assert load_model(str(out / "repaired"))(x).shape == (3, 10)
    # Once more, from the beginning: the training and the repair are finished.
    code, printed, _ = invoke("train", "digits/standard", *SHORT, "-o", "repair.floor=1", "--out", out, "--resume")
    assert code == 0
    assert "Fitted on 100 images" in printed


def test_unreachable_floor_keeps_the_trained_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.warns(UserWarning, match="was trained but not repaired: a floor of 99.5% is not reachable"):
        code, printed, _ = invoke("train", "digits/standard", *SHORT, "-o", "repair.floor=99.5", "--out", out)
    assert code == 0
    assert "best epoch" in printed
    assert f"next: classwise evaluate --model {out} --data digits" in printed
    assert not (out / "repaired" / "repair.json").exists()
    x = to_float(load_data("digits", split="test").images[:3])
    with torch.no_grad():
        assert load_model(str(out))(x).shape == (3, 10)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("repair.floor=0", "repair.floor"),
        ("repair.floor=100", "repair.floor"),
        ("repair.rule=wurst", "repair.rule"),
        ("repair.flor=20", "did you mean"),
    ],
)
def test_invalid_repair_in_a_recipe_is_refused(tmp_path: Path, override: str, message: str) -> None:
    line = error("train", "digits/standard", *SHORT, "-o", override, "--out", tmp_path / "run")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_repaired_run_can_be_moved(run: Path, tmp_path: Path) -> None:
    """A run directory may be moved with its repair inside."""
    shutil.copytree(run, tmp_path / "moved")
    arguments = ["--data", "digits", *QUICK, "--no-evaluate", "--rule", "worst"]
    code, _, _ = invoke("repair", tmp_path / "moved", *arguments, "--out", tmp_path / "moved" / "repaired")
    assert code == 0
    (tmp_path / "moved").rename(tmp_path / "again")
    x = to_float(load_data("digits", split="test").images[:3])
    with torch.no_grad():
        shift = load_model(str(tmp_path / "again" / "repaired"))(x) - load_model(str(tmp_path / "again"))(x)
    biases = torch.tensor(load_repair(tmp_path / "again" / "repaired").biases)
    torch.testing.assert_close(shift, biases.expand(3, 10), atol=2e-5, rtol=0)
