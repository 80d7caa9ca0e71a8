"""Errors in a command line are one line with exit code 2; light commands import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "classwise", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--per-clas", "3"], "unknown option '--per-clas': did you mean '--per-class'? See "),
        (["evaluate", "--zzz", "3"], "unknown option '--zzz'; see "),
        (["evaluate", "--data", "digits"], "missing option '--model'; see "),
        (["evaluate", "--per-class"], "option '--per-class' requires an argument; see "),
        (["evalute"], "unknown command 'evalute': did you mean 'evaluate'? See "),
        (["nonsense"], "unknown command 'nonsense'; see "),
        (["check", "somewhere", "--min-worst", "many"], "--min-worst"),
        (["check", "somewhere", "--min-worst", "3"], "no such run directory: somewhere"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_no_arguments_print_the_help() -> None:
    ended = run()
    assert ended.returncode == 2
    assert "Measure:" in ended.stdout


def test_exit_code_0() -> None:
    assert run("--version").returncode == 0
    assert run("list", "attacks").returncode == 0


LIGHT = [
    ["--help"],
    ["evaluate", "--help"],
    ["list", "attacks"],
    ["list", "recipes"],
    ["list", "studies"],
    ["check", "RUN", "--min-worst", "0"],
    ["table", "RUN"],
    ["compare", "RUN", "RUN"],
    ["site", "RUN", "--out", "OUT"],
]


def test_light_commands_import_no_torch(tmp_path: Path) -> None:
    run = Path(__file__).resolve().parents[3] / "results" / "cifar10-resnet18" / "trades"
    places = {"RUN": str(run), "OUT": str(tmp_path / "site")}
    commands = [[places.get(argument, argument) for argument in command] for command in LIGHT]
    code = f"""
import sys
from classwise.cli import app
assert not {{"numpy", "pydantic", "torch"}} & set(sys.modules)
for command in {commands!r}:
    assert app(command, standalone_mode=False) in (None, 0), command
    assert "torch" not in sys.modules, command
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
