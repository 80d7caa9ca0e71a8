"""``classwise check`` in a pipeline: exit codes, output, files, and the GitHub Action."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import junitparser
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from classwise.cli import app
from classwise.reporting import ClassReport
from classwise.reporting.check_output import _data, _property
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Finding, Sanity
from classwise.storage.verdicts import Verdicts

REPOSITORY = Path(__file__).resolve().parents[3]
CLASSES = ["ant", "bee", "cat"]
N = 1000
HOSTILE = [
    "<b onload=x>&\"'</testcase>]]>",
    "one\n::error::planted\r\n##[error]planted",
    "\x1b[31mred\x00\x07\ufffe\u202etac %0A,:\ud800" + "x" * 300,
]


def evaluated(folder: Path, held: np.ndarray, *, classes: list[str] = CLASSES, sanity: Sanity | None = None) -> Path:
    """A run directory with three classes of ``N`` examples; ``held`` says which survive."""
    labels = np.repeat([0, 1, 2], N)
    verdicts = Verdicts(
        index=np.arange(3 * N), label=labels, natural=labels, attacks={"pgd": np.where(held, labels, (labels + 1) % 3)}
    )
    report = ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="insects", split="test", n=3 * N, classes=classes),
        model={},
        threat=ThreatInfo(norm="Linf", eps=0.1, eps_text="0.1"),
        attacks={},
        sanity=sanity,
    )
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report.model_dump(mode="json", by_alias=True)), encoding="ascii")
    verdicts.save(folder / "verdicts.parquet", "")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline at 40, 60 and 50%; the same with another random seed; and one in which class bee is 8 points lower."""
    root = tmp_path_factory.mktemp("runs")
    held = np.concatenate([np.arange(N) < count for count in (400, 600, 500)])
    flipped = held ^ (np.random.default_rng(1).random(3 * N) < 0.005)
    worse = held.copy()
    worse[N + 520 : N + 600] = False
    evaluated(root / "baseline", held)
    evaluated(root / "again", flipped)
    evaluated(root / "worse", worse)
    evaluated(root / "hostile", held, classes=HOSTILE)
    return root


def invoke(*arguments: object, **environment: str) -> tuple[int, str, str]:
    given = {"GITHUB_ACTIONS": "", **environment}
    result = CliRunner().invoke(app, ["check", *(str(argument) for argument in arguments)], env=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_table_shows_measured_and_required_values(runs: Path) -> None:
    code, out, err = invoke(runs / "baseline", "--min-worst", 30, "--min-class", "bee=61", "--max-cv", 100)
    assert (code, err) == (1, "")
    head, *lines = out.splitlines()
    assert re.split(r"  +", head.strip()) == ["what", "measured [95%]", "required", "verdict"]
    worst, bee, variance = [re.split(r"  +", line.strip()) for line in lines]
    assert worst == ["worst-case: worst class ant", worst[1], "at least 30", "ok"]
    assert worst[1].startswith("40.00 [")
    assert bee == ["worst-case: class bee", "60.00 [56.93, 62.99]", "at least 61", "FAILED"]
    assert variance[1].startswith("66.67 [")


def test_limits_with_confidence_are_stricter(runs: Path) -> None:
    assert invoke(runs / "baseline", "--min-worst", 39)[0] == 0
    code, out, _ = invoke(runs / "baseline", "--min-worst", 39, "--confident")
    assert (code, "at least 39 with 95% confidence" in out) == (1, True)
    assert invoke(runs / "baseline", "--min-worst", 36, "--confident")[0] == 0


def test_a_planted_regression_fails_and_another_seed_passes(runs: Path) -> None:
    code, out, _ = invoke(runs / "worse", "--no-worse-than", runs / "baseline", "--alpha", 0.01)
    assert code == 1
    failed = [line for line in out.splitlines() if line.rstrip().endswith("FAILED")]
    assert [line.split(", change")[0] for line in failed] == ["worst-case: average", "worst-case: class bee"]
    assert "-8.00 points (p = " in failed[1]
    assert "no loss at alpha = 0.01" in failed[1]
    assert invoke(runs / "again", "--no-worse-than", runs / "baseline")[0] == 0


def test_json_output_is_valid_with_annotations(runs: Path) -> None:
    code, out, err = invoke(runs / "baseline", "--min-worst", 41, "--json", GITHUB_ACTIONS="true")
    answer = json.loads(out)
    assert (code, answer["passed"]) == (1, False)
    (check,) = answer["checks"]
    assert check["value"] == 40
    assert check["low"] < 40 < check["high"]
    assert (check["what"], check["wanted"]) == ("worst-case: worst class ant", "at least 41")
    assert err.startswith("::error ")


def test_annotations_on_github(runs: Path) -> None:
    arguments = [runs / "baseline", "--min-worst", 41, "--min-average", 1]
    plain = invoke(*arguments)[1]
    assert "::" not in plain
    for out in (invoke(*arguments, GITHUB_ACTIONS="true")[1], invoke(*arguments, "--github")[1]):
        first, *table, last, error, notice = out.splitlines()
        token = first.removeprefix("::stop-commands::")
        assert (last, len(token)) == (f"::{token}::", 32)
        assert "\n".join(table) == plain.rstrip("\n")
        assert error.startswith(
            "::error title=classwise%3A worst-case%3A worst class ant::worst-case: worst class ant: 40"
        )
        assert notice == "::notice title=classwise::1 of 2 checks failed"
    assert invoke(*arguments, "--no-github", GITHUB_ACTIONS="true")[1] == plain


def test_annotation_escapes_round_trip() -> None:
    text = "100%: a, b\r\nc %25"
    escaped = _property(text)
    assert not set(escaped) & set(":,\r\n")
    for code, sign in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        escaped = escaped.replace(code, sign)
    assert escaped == text
    assert _data("5%: a, b\n") == "5%25: a, b%0A"


def commands_of(log: str) -> list[str]:
    """Return the lines that GitHub's runner interprets as commands, except between stop-commands and its token."""
    found, token = [], None
    for line in log.splitlines():
        command = re.match(r"\s*::([^: ]+)[^:]*::(.*)", line) or re.search(r"##\[([^]]+)\](.*)", line)
        if command and token is None and command[1] == "stop-commands":
            token = command[2]
        elif command and command[1] == token:
            token = None
        elif command and token is None:
            found.append(command[1])
    return found


def test_hostile_class_names_stay_text(runs: Path, tmp_path: Path) -> None:
    limits = [part for label in range(3) for part in ("--min-class", f"{label}=99")]
    junit = tmp_path / "deep" / "check.xml"
    code, out, _ = invoke(runs / "hostile", *limits, "--junit", junit, GITHUB_ACTIONS="true")
    assert code == 1
    assert commands_of(out) == ["error", "error", "error", "notice"]
    assert not set(out) & set("\x1b\x00\x07\r\u202e\ud800")
    cases = ElementTree.parse(junit).getroot().findall("testsuite/testcase")
    assert len(cases) == 3
    assert cases[0].get("name") == f"worst-case: class {HOSTILE[0]}"
    assert "one ::error::planted" in cases[1].get("name")
    assert len(list(junitparser.JUnitXml.fromfile(str(junit)))) == 1


def test_junit_is_readable(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.xml"
    demands = ["--min-worst", 30, "--min-average", 90, "--no-worse-than", runs / "baseline"]
    assert invoke(runs / "worse", *demands, "--junit", file)[0] == 1
    (suite,) = junitparser.JUnitXml.fromfile(str(file))
    assert (suite.name, suite.tests, suite.failures, suite.errors) == ("classwise check", 6, 3, 0)
    failed = {case.name: case.result[0].message for case in suite if case.result}
    assert list(failed) == [
        "worst-case: average",
        "worst-case: average, change",
        "worst-case: class bee, change",
    ]
    assert re.fullmatch(r"47\.33 \[[\d., ]+\] \(required: at least 90\)", failed["worst-case: average"])
    root = ElementTree.parse(file).getroot()
    assert (root.get("tests"), root.get("failures")) == ("6", "3")
    assert len(root.findall("testsuite/testcase/failure")) == 3


def test_findings_fail_the_check(tmp_path: Path) -> None:
    found = Sanity(findings=[Finding(severity="warning", code="zero-gradient", text="At 9 of 40 images")])
    run = evaluated(tmp_path / "run", np.ones(3 * N, dtype=bool), sanity=found)
    assert invoke(run, "--fail-on", "error")[0] == 0
    code, out, _ = invoke(run, "--fail-on", "warning")
    assert (code, "At 9 of 40 images" in out) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-class", "bea=3"], "unknown class 'bea': did you mean 'bee'? expected a name or a label from 0 to 2"),
        (["--min-class", "bee"], "a limit for a class must be name=percent, such as cat=30, got 'bee'"),
        (["--max-cv", "-1"], "a limit must be a variance in percent² from 0 to 2500, got -1.0"),
        (["--confident"], "nothing to check: pass --min-worst, --min-average, --min-class, --max-mcd, --max-cv,"),
        (["--min-worst", "1", "--junit", "{tmp}"], "is a directory: --junit expects a file"),
        (["--min-worst", "1", "--no-worse-than", "{tmp}/none"], "no such run directory"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    runs: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "check.xml"
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    code, out, err = invoke(runs / "baseline", "--junit", file, *given)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not file.exists()


def bash(script: str | Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a real bash, with the ``classwise`` of this environment first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "GITHUB_ACTIONS": "", "PATH": path, **environment}
    how = [*options, str(script)] if isinstance(script, Path) else [*options, "-c", script]
    return subprocess.run(
        ["bash", "--noprofile", "--norc", *how], capture_output=True, text=True, env=given, check=False
    )


def test_exit_code_in_a_pipeline(runs: Path) -> None:
    script = """
    set -o pipefail
    classwise check "$RUNS/again" --no-worse-than "$RUNS/baseline" | tee "$RUNS/log" | wc -l > /dev/null; echo $?
    classwise check "$RUNS/worse" --no-worse-than "$RUNS/baseline" | grep FAILED > "$RUNS/failed"; echo $?
    """
    ended = bash(script, RUNS=str(runs))
    assert ended.stdout.split() == ["0", "1"], ended.stderr
    assert (runs / "log").read_text(encoding="utf-8").count("ok") == 4
    assert len((runs / "failed").read_text(encoding="utf-8").splitlines()) == 2


@pytest.fixture(scope="module")
def action() -> dict:
    return yaml.safe_load((REPOSITORY / "action.yml").read_text(encoding="utf-8"))


def test_action_passes_inputs_through_the_environment(action: dict) -> None:
    assert action["runs"]["using"] == "composite"
    *_, step = action["runs"]["steps"]
    named = re.findall(r"\$\{\{ inputs\.([a-z-]+) \}\}", " ".join(step["env"].values()))
    assert sorted([*named, "install"]) == sorted(action["inputs"])
    for one in action["runs"]["steps"]:
        assert one["shell"] == "bash"
        assert "${{" not in one["run"]
    assert set(re.findall(r"\$CHECK_\w+", step["run"])) == {f"${name}" for name in step["env"]}


def test_action_has_every_limit_of_the_command(action: dict) -> None:
    options = set(re.findall(r"--([a-z-]+)", invoke("--help")[1]))
    assert options - {"json", "github", "no-github", "help"} == set(action["inputs"]) - {"run", "install"}


def test_documented_examples_match_the_action(action: dict) -> None:
    text = (REPOSITORY / "docs" / "ci.md").read_text(encoding="utf-8")
    workflow, gitlab, hooks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (used,) = [step["with"] for step in workflow["jobs"]["gate"]["steps"] if "classwise" in step.get("uses", "")]
    assert used.keys() <= action["inputs"].keys()
    assert gitlab["robustness"]["artifacts"]["reports"]["junit"] in " ".join(gitlab["robustness"]["script"])
    assert hooks["repos"][0]["hooks"][0]["language"] == "system"
    known = set(re.findall(r"--[a-z-]+", invoke("--help")[1]))
    commands = re.findall(r"classwise check ([^#\n]*)", text)
    assert len(commands) > 5
    assert set(re.findall(r"--[a-z-]+", " ".join(commands))) <= known


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"run": "baseline", "min-worst": "39", "min-class": "ant=30\nbee=60\n", "junit": "check.xml"}, 0),
        ({"run": "worse", "no-worse-than": "baseline", "alpha": "0.01", "confident": "true", "max-mcd": "50"}, 1),
        ({"run": "$(touch planted)", "min-worst": '1"; touch planted; `touch planted`'}, 2),
    ],
)
def test_exit_code_of_the_action(runs: Path, tmp_path: Path, action: dict, inputs: dict[str, str], code: int) -> None:
    *_, step = action["runs"]["steps"]
    given = {name: str(about.get("default", "")) for name, about in action["inputs"].items()} | inputs
    for name in ("run", "no-worse-than"):
        if (runs / given[name]).is_dir() and given[name]:
            given[name] = str(runs / given[name])
    environment = {
        name: re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda found: given[found[1]], value)
        for name, value in step["env"].items()
    }
    file = tmp_path / "step.sh"
    file.write_text(f"cd {tmp_path}\n{step['run']}", encoding="utf-8")
    ended = bash(file, "-e", "-o", "pipefail", GITHUB_ACTIONS="true", **environment)
    assert ended.returncode == code, ended.stderr
    assert not (tmp_path / "planted").exists()
    assert (tmp_path / "check.xml").exists() == ("junit" in inputs)
    expected = {0: ["notice"], 1: ["error", "error", "notice"], 2: []}
    assert commands_of(ended.stdout) == expected[code]
