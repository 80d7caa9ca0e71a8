"""Backward compatibility: documented commands run, and no public name disappears.

``tests/data/contract.json`` lists commands, options, names of specs with their keys, recipes, Python names, files and
JSON keys. To add new ones: ``python tests/test_contract.py``. Entries are only ever added.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "tests" / "data" / "contract.json"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
KINDS = ("attacks", "methods", "models", "datasets", "recipes", "analyses", "studies", "repairs")

NOT_RUN = {
    r"cifar10|imagenet|resnet18|mnist": "needs a data set that is not bundled",
    r"--workers|--processes|torchrun": "starts processes, as tests/distributed and the tests of training do",
    r"classwise study": "trains many models; tests/unit/studies runs studies",
    r"hf:(?!wat-model)|timm:|onnx:|folder:PATH": "needs a model or a directory of the reader",
    r"--log (mlflow|tensorboard)": "the tests of training run loggers",
    r"KIND|\.\.\.|…|HOST|PATH|\$": "has a placeholder",
    r"runs/(imagenet|a|b|c)\b": "uses a run of a command above that is not run",
    r"trades\.safetensors": "needs a checkpoint of the reader",
    r"digits/(mart|cfa|csl)": "the tests of recipes run every recipe",
}
"""Documented commands that are parsed, but not run, and why."""
SMALLER = {
    "train": ["-o", "epochs=3", "-o", "attack.steps=1"],
    "evaluate": ["--per-class", "5"],
    "repair": ["--attack", "pgd:steps=1"],
}
"""Appended to a documented command, so that it takes a second."""
REPLACED = {
    "--attack autoattack": "--attack autoattack:steps=2,queries=2",
    "--attack fast": "--attack pgd:steps=2",
    "--floor 20": "--rule rho",
    "--min-class cat=30": "--min-class 3=30",
    "repair.floor=20": "repair.rule=rho",
}
"""Settings that a small model does not reach, or that take long."""
RUNS_AT_FIRST = {"runs/new": "runs/wat", "runs/released": "runs/trades", "runs/standard": "runs/trades"}
"""Runs that a page takes as given, and those of the README that stand in for them."""


def documented() -> Iterator[tuple[str, str]]:
    """Page and command line of every ``classwise`` command in a block of shell code."""
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s#.*", "", line).strip()
                if re.match(r"(\w+=\S+ )*classwise ", line):
                    yield page, " ".join(line.split())


def parsed(line: str) -> None:
    """Parse a command line without running it: every command and option must exist."""
    words = [word for word in shlex.split(line[line.index("classwise ") :])[1:] if word not in ("...", "…", "$L")]
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words[0]
        command, words = command.commands[words[0]], words[1:]
    command.make_context("classwise", words)


def fresh(words: list[str]) -> list[str]:
    """Replace an ``--out`` directory that an earlier documented command has already used."""
    for position, word in enumerate(words[:-1]):
        out = Path(words[position + 1])
        taken = (out / "report.json").exists() if words[0] == "evaluate" else out.exists()
        if word in ("--out", "--to") and taken and words[0] in ("train", "evaluate", "repair", "export"):
            number = next(number for number in range(2, 99) if not Path(f"{out}-{number}").exists())
            return [*words[: position + 1], f"{out}-{number}", *words[position + 2 :]]
    return words


def run(*words: str) -> str:
    """Run a command and return what it prints. A check may fail: the models are small."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"classwise {shlex.join(words)}") from result.exception
    accepted = (0, 1) if words[0] == "check" else (0,)
    assert result.exit_code in accepted, f"classwise {shlex.join(words)}: {result.stderr}"
    return result.stdout


def documented_commands_run() -> None:
    """Run the documented commands in the current directory, in the order of the pages."""
    failed = []
    for page, line in documented():
        if any(re.search(pattern, line) for pattern in NOT_RUN):
            continue
        for old, new in REPLACED.items():
            line = re.sub(rf"{old}(?=\s|$)", new, line)
        words = fresh(shlex.split(line)[1:])
        if page != "README.md":
            for name, source in RUNS_AT_FIRST.items():
                if name in line and not Path(name).exists():
                    shutil.copytree(source, name)
        try:
            run(*words, *SMALLER.get(words[0], []))
        except AssertionError as error:
            failed.append(f"{page}: {error.__cause__ or error}")
    assert not failed, "\n".join(failed)


def test_documented_commands_and_options_exist() -> None:
    lines = list(documented())
    assert len(lines) > 50
    for page, line in lines:
        try:
            parsed(line)
        except Exception as error:
            if type(error).__name__ == "MissingParameter" and re.search(r"\.\.\.|…", line):
                continue
            error.add_note(f"{page}: {line}")
            raise


def test_commands_that_are_not_run_need_a_reason() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for _, line in documented()), pattern


# ---- what exists


def current(directory: Path) -> dict[str, Any]:
    """Collect everything that the contract lists; ``directory`` contains the results of the documented commands."""
    found: dict[str, Any] = {
        "commands": commands(typer.main.get_command(app)),
        "names": {kind: json.loads(run("list", kind, "--json")) for kind in KINDS},
        "keys": {
            "attacks": {name: keys(kind) for name, kind in cw.attacks.ATTACKS.items()},
            "objectives": {name: keys(kind) for name, kind in cw.objectives.OBJECTIVES.items()},
            "policies": {name: keys(kind) for name, kind in cw.policies.POLICIES.items()},
            "models": {name: keys(kind) for name, kind in cw.models.MODELS.items()},
        },
        "python": {name: keys(value) if inspect.isfunction(value := getattr(cw, name)) else [] for name in cw.__all__},
        "files": {name: files(directory / name) for name in ("runs/trades", "runs/aa", "runs/repaired", "wat-model")},
        "json": {
            f"{name}/{file}": sorted(paths(json.loads((directory / name / file).read_text(encoding="utf-8"))))
            for name, file in (
                ("runs/trades", "run.json"),
                ("runs/trades", "report.json"),
                ("runs/aa", "report.json"),
                ("runs/repaired", "repair.json"),
            )
        },
    }
    return found


def files(directory: Path) -> list[str]:
    """The files below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def commands(command: Any) -> dict[str, Any]:
    """Options of a command, and its commands."""
    options = [one for one in command.params if one.param_type_name == "option"]
    found: dict[str, Any] = {"options": sorted(name for one in options for name in (*one.opts, *one.secondary_opts))}
    if hasattr(command, "commands"):
        shown = {name: one for name, one in sorted(command.commands.items()) if not one.hidden}
        found["commands"] = {name: commands(one) for name, one in shown.items()}
    return found


def keys(thing: Any) -> list[str]:
    """The settings of a class or the parameters of a function."""
    if dataclasses.is_dataclass(thing):
        return [one.name for one in dataclasses.fields(thing) if one.init]
    return list(inspect.signature(thing).parameters)


def paths(value: Any, prefix: str = "") -> set[str]:
    """All keys of a JSON value as paths; the items of a list share theirs."""
    if isinstance(value, list):
        return {f"{prefix}[]"}.union(*(paths(one, f"{prefix}[]") for one in value))
    if not isinstance(value, Mapping):
        return {prefix}
    return {path for key, one in value.items() for path in paths(one, f"{prefix}.{key}" if prefix else key)}


def missing(expected: Any, found: Any, where: str = "") -> list[str]:
    """Return the entries of the contract that no longer exist."""
    if isinstance(expected, Mapping):
        return [
            line
            for key, value in expected.items()
            for line in (missing(value, found[key], f"{where}/{key}") if key in found else [f"{where}/{key}"])
        ]
    return [f"{where}: {one}" for one in expected if not any(same(one, other) for other in found)]


def same(one: str, other: str) -> bool:
    """Return whether two paths are equal or one is a prefix of the other: an object may also be null or an empty
    list.
    """
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and long[len(short) :][:1] in ("", ".", "[")


@pytest.mark.slow
def test_documented_commands_run_and_nothing_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLASSWISE_DATA", raising=False)
    documented_commands_run()
    assert not missing(json.loads(CONTRACT.read_text(encoding="utf-8")), current(tmp_path))


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        documented_commands_run()
        content = json.dumps(current(Path(place)), indent=1, ensure_ascii=False)
    CONTRACT.write_text(f"{content}\n", encoding="utf-8")
