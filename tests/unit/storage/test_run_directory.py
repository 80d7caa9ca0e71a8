from __future__ import annotations

import calendar
import json
import time

import pytest

from classwise.core.errors import InputError
from classwise.storage.run_directory import RunDirectory, hardware, versions

ASKED = {"data": "digits/test", "threat": "Linf 8/255", "model": {"name": "net", "width": 8}}


def claim(path, fingerprint="f1", asked=ASKED, *, section="training", resume=False, beside=None) -> bool:
    return RunDirectory(path).claim(section, fingerprint, {"asked": asked}, resume=resume, beside=beside)


def refused(path, *args, **kwargs) -> str:
    before = contents(path)
    with pytest.raises(InputError) as caught:
        claim(path, *args, **kwargs)
    assert contents(path) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(path) -> dict:
    if not path.is_dir():
        return {}
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def read(path) -> dict:
    return json.loads((path / "run.json").read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs" / "first"


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_directory(run, resume):
    before = time.time()
    assert claim(run, resume=resume) is False
    written = read(run)
    assert written.keys() == {"schema", "training"}
    assert written["schema"] == "classwise/run/1"
    section = written["training"]
    assert section.keys() == {"fingerprint", "asked", "versions", "hardware", "started"}
    assert (section["fingerprint"], section["asked"]) == ("f1", ASKED)
    assert (section["versions"], section["hardware"]) == (versions(), hardware())
    started = time.strptime(section["started"], "%Y-%m-%dT%H:%M:%SZ")
    assert int(before) <= calendar.timegm(started) <= time.time()
    assert list(contents(run)) == ["run.json"]


def test_empty_directory_is_accepted(run):
    run.mkdir(parents=True)
    assert claim(run) is False


def test_the_same_run_again(run):
    claim(run)
    first = read(run)
    assert claim(run, resume=True) is True
    assert read(run) == first
    assert refused(run) == f"{run} already holds this training: add --resume to continue it"


@pytest.mark.parametrize("resume", [False, True])
def test_another_run_names_what_differs(run, resume):
    claim(run)
    asked = {"data": "digits/test", "threat": "Linf 4/255", "model": {"name": "net", "width": 16}, "seed": 3}
    message = refused(run, "f2", asked, resume=resume)
    assert message == (
        f"{run} holds another training (differs in model.width: 8 there, 16 requested, seed: not set there, "
        "3 requested, threat: Linf 8/255 there, Linf 4/255 requested): choose another --out"
    )


def test_an_added_object_is_named_without_its_settings(run):
    RunDirectory(run).claim("training", "f1", {"asked": {"attacks": {"pgd": "PGD(steps=5)"}}}, resume=False)
    message = refused(run, "f2", {"attacks": {"fgsm": "FGSM(eps='0.2')"}}, resume=True)
    assert (
        "(differs in attacks.fgsm: not set there, FGSM requested, attacks.pgd: PGD there, not set requested)" in message
    )


def test_released_directory_accepts_another_run(run):
    claim(run)
    RunDirectory(run).release("training")
    assert "training" not in read(run)
    assert claim(run, "f2") is False


def test_differing_inputs_are_named(run):
    claim(run)
    assert "(differs in its inputs)" in refused(run, "f2", resume=True)


def test_evaluation_in_a_training_directory(run):
    claim(run)
    RunDirectory(run).checkpoints.mkdir()
    training = read(run)["training"]
    assert f"the training of another run: pass {run} as the model, or" in refused(run, "e1", section="evaluation")
    assert claim(run, "e1", section="evaluation", beside="training") is False
    assert claim(run, "e1", section="evaluation", resume=True) is True
    assert read(run)["training"] == training
    assert read(run)["evaluation"]["fingerprint"] == "e1"
    assert "another evaluation" in refused(run, "e2", section="evaluation")
    assert claim(run, resume=True) is True


def test_foreign_directory_is_not_changed(run):
    run.mkdir(parents=True)
    (run / "thesis.tex").write_text("do not lose")
    (run / "zoo.txt").write_text("")
    assert refused(run) == f"{run} is not empty and holds no run (thesis.tex): choose another --out"
    assert refused(run, resume=True).startswith(f"{run} is not empty")


def test_path_is_a_file(run):
    run.parent.mkdir()
    run.write_text("I was here")
    assert refused(run) == f"{run} is a file, not a directory"
    assert run.read_text() == "I was here"


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "3", '"text"'])
def test_a_damaged_record(run, content):
    run.mkdir(parents=True)
    (run / "run.json").write_text(content)
    assert str(run / "run.json") in refused(run, resume=True)


def test_finish_adds_to_its_section(run):
    claim(run)
    claim(run, "e1", section="evaluation", beside="training")
    before = read(run)
    RunDirectory(run).finish("training", best_epoch=3)
    after = read(run)
    assert after["evaluation"] == before["evaluation"]
    assert after["training"].pop("best_epoch") == 3
    time.strptime(after["training"].pop("finished"), "%Y-%m-%dT%H:%M:%SZ")
    assert after["training"] == before["training"]


def test_read_without_record(run):
    assert RunDirectory(run).read() == {"schema": "classwise/run/1"}


def test_paths(run):
    directory = RunDirectory(run)
    named = {
        directory.checkpoints: "checkpoints",
        directory.metrics: "metrics.jsonl",
        directory.validation: "validation.json",
        directory.verdicts: "verdicts.parquet",
        directory.report: "report.json",
        directory.page: "report.html",
    }
    assert named == {run / name: name for name in named.values()}


def test_versions():
    import torch

    assert versions()["torch"] == torch.__version__
    assert {"python", "classwise", "numpy"} <= versions().keys()
