"""``python -m benchmarks`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as command
from classwise.cli import app
from classwise.models import digits_cnn
from classwise.storage.files import read_json

FACTORY = """
import torch
from classwise.models import digits_cnn

def net():
    torch.manual_seed(0)
    return digits_cnn()

class Stops(torch.nn.Module):
    'Raises KeyboardInterrupt in a given pass under attack.'
    def __init__(self, passes):
        super().__init__()
        self.inner, self.left = net(), passes
    def forward(self, x):
        if x.requires_grad:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.inner(x)

def stops_in_the_warm_up():
    return Stops(3)

def stops_in_round_3():
    return Stops(2 * 3 + 1)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(FACTORY)
    return f"{tmp_path / 'nets.py'}:net"


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(command.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_former_command_names_its_replacement() -> None:
    result = CliRunner().invoke(app, ["bench", "evaluate", "--peers"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "python -m benchmarks evaluate --peers" in result.stderr


def test_evaluate_with_defaults() -> None:
    code, out, _ = invoke("evaluate", "--images", 20, "--rounds", 1, "--peers")
    assert code == 0
    assert "pgd:steps=20,start=zero" in out
    assert "Linf eps = 0.2" in out
    row = next(line for line in out.splitlines() if line.startswith("| classwise"))
    assert "400" in row.split()  # 20 images, 20 steps


def test_evaluate_writes_what_it_prints(model: str, tmp_path: Path) -> None:
    arguments = ["--model", model, "--data", "digits", "--images", 10, "--rounds", 2, "--eps", "0.1", "--batch-size", 4]
    attacks = ["--attack", "pgd:steps=2", "--attack", "fgsm"]
    code, out, _ = invoke("evaluate", *arguments, *attacks, "--out", tmp_path / "out", "--json")
    assert code == 0
    content = read_json(tmp_path / "out" / "bench.json")
    assert json.loads(out) == content
    assert [case["spec"] for case in content["cases"]] == ["pgd:steps=2", "fgsm"]
    assert [case["entries"][0]["forwards"] for case in content["cases"]] == [20, 10]
    assert (content["rounds"], content["batch_size"], content["interrupted"]) == (2, 4, False)
    code, _, err = invoke("evaluate", *arguments, "--out", tmp_path / "out")
    assert (code, err.startswith("error: "), "already contains a benchmark" in err) == (2, True, True)


def test_attack_with_its_own_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "digits_net", digits_cnn)
    code, out, _ = invoke("evaluate", "--images", 4, "--rounds", 1, "--attack", "pgd:steps=1,eps=0.3")
    assert (code, "Linf eps = 0.3" in out) == (0, True)


def test_train(tmp_path: Path) -> None:
    overrides = ["-o", "batch_size=8", "-o", "attack.steps=2"]
    code, out, _ = invoke("train", *overrides, "--steps", 2, "--rounds", 2, "--peers", "--out", tmp_path / "out")
    assert code == 0
    assert "reference style" in out
    assert "extrapolated" in out
    found = read_json(tmp_path / "out" / "bench.json")
    assert (found["recipe"], found["steps"], found["attack_steps"]) == ("digits/trades", 2, 2)
    assert found["overrides"] == {"batch_size": 8, "attack.steps": 2}


def test_interruption_after_a_complete_round_writes_a_result(model: str, tmp_path: Path) -> None:
    """Each run takes two passes: the warm-up and two rounds are complete."""
    stopping = model.replace(":net", ":stops_in_round_3")
    arguments = ["--data", "digits", "--images", 4, "--attack", "pgd:steps=2", "--rounds", 5]
    code, out, _ = invoke("evaluate", "--model", stopping, *arguments, "--engine", "eager", "--out", tmp_path / "out")
    assert code == 130
    found = read_json(tmp_path / "out" / "bench.json")
    assert (found["rounds"], found["interrupted"]) == (2, True)
    assert "2 interleaved rounds (interrupted)" in out
    assert (tmp_path / "out" / "bench.svg").exists()


def test_interruption_before_a_complete_round_writes_no_result(model: str, tmp_path: Path) -> None:
    stopping = model.replace(":net", ":stops_in_the_warm_up")
    arguments = ["--data", "digits", "--images", 4, "--attack", "pgd:steps=2"]
    code, out, err = invoke("evaluate", "--model", stopping, *arguments, "--engine", "eager", "--out", tmp_path / "out")
    assert (code, out) == (130, "")
    assert err.strip().splitlines()[-1] == "interrupted before the first round was complete: there is no result"
    assert not (tmp_path / "out" / "bench.json").exists()


BAD_INPUT: list[tuple[list[str], str]] = [
    (["evaluate", "--attack", "pdg"], "did you mean 'pgd'?"),
    (["evaluate", "--attack", "pgd:stepz=3"], "did you mean 'steps'?"),
    (["evaluate", "--data", "digits"], "--weights and --data require --model"),
    (["evaluate", "--model", "{model}"], "requires --data"),
    (["evaluate", "--model", "{model}", "--data", "digit"], "did you mean 'digits'?"),
    (["evaluate", "--model", "resnet81", "--data", "digits"], "did you mean 'resnet18'?"),
    (["evaluate", "--model", "{model}", "--data", "digits", "--images", "0"], "images must be at least 1"),
    (["evaluate", "--model", "{model}", "--data", "digits", "--rounds", "0"], "rounds must be at least 1"),
    (["evaluate", "--model", "{model}", "--data", "digits", "--eps", "x"], "eps = 'x' is not a number"),
    (["evaluate", "--device", "tpu9"], "unknown device 'tpu9'"),
    (["train", "--recipe", "digits/trade"], "did you mean 'digits/trades'?"),
    (["train", "-o", "seed"], "expected key=value"),
    (["train", "--steps", "0"], "steps must be at least 1"),
    (["train", "--rounds", "0"], "rounds must be at least 1"),
    (["growth", "--rounds", "0"], "rounds must be at least 1"),
    (["growth", "--device", "tpu9"], "unknown device 'tpu9'"),
]


def test_bad_input_is_one_line_and_exit_2(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "digits_net", digits_cnn)
    for arguments, message in BAD_INPUT:
        code, out, err = invoke(*(argument.format(model=model) for argument in arguments))
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), arguments
        assert err.startswith("error: "), arguments
        assert message in err, arguments
