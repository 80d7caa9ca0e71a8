"""What is wrong with a command is said in one line, with the right exit code, by the program itself."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "classwise", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "--modl", "x"], "No such option: --modl"),
        (["evaluate", "--data", "digits"], "--model"),
        (["nonsense"], "nonsense"),
        (["check", "somewhere", "--min-worst", "many"], "--min-worst"),
        (["check", "somewhere", "--min-worst", "3"], "no such run directory: somewhere"),
    ],
)
def test_one_line_and_two(words: list[str], told: str) -> None:
    ended = run(*words)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_no_words_at_all_are_answered_with_help() -> None:
    ended = run()
    assert ended.returncode == 2
    assert "Measure:" in ended.stdout


def test_exit_codes_pass_through() -> None:
    assert run("--version").returncode == 0
    assert run("list", "attacks").returncode == 0
